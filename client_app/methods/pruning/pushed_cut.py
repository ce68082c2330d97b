"""The smaller model that a pruning method's server pushed, opened at a client."""

from collections.abc import Sequence

from client_app.protocol.push import pushed_parts
from client_app.site import Site
from espalier.hf.opening.opened_model import OpenedModel
from espalier.hf.structured.selection import open_cut
from espalier.messages.blobs.cuts import cut_specs
from espalier.messages.message import Header
from espalier.messages.parts import parts_of
from espalier.models.plan import block_key


def pushed_cut(
    site: Site, header: Header, biases: Sequence[str], scaled: Sequence[str] = ()
) -> OpenedModel:
    """Open the federated smaller model that the server pushed."""
    parts = parts_of(cut_specs(site.model.plan, biases, scaled), site.settings.part_bytes)
    store, hashes, _ = pushed_parts(site, header, len(parts))
    return open_cut(site.model, lambda index: store.get(hashes[block_key(index)]), biases)
