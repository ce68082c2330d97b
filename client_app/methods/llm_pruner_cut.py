"""Federated smaller model at a client, opened from the pushed cut."""

from collections.abc import Sequence

from client_app.protocol.push import taken
from client_app.site import Site
from espalier.hf.opening.opened import OpenedModel
from espalier.hf.structured.opened_cut import open_cut
from espalier.messages.blobs.cuts import cut_specs
from espalier.messages.message import Header
from espalier.messages.parts import parts_of
from espalier.models.plan import block_key


def delivered_cut(
    site: Site, header: Header, biases: Sequence[str], scaled: Sequence[str] = ()
) -> OpenedModel:
    """Open the federated smaller model.

    Raises
    ------
    InputError
        The server has not pushed all parts.
    """
    parts = parts_of(cut_specs(site.model.plan, biases, scaled), site.settings.part_bytes)
    store, hashes, _ = taken(site, header, len(parts))
    return open_cut(site.model, lambda index: store.get(hashes[block_key(index)]), biases)
