"""Federated smaller model at a client, opened from the pushed cut."""

from collections.abc import Sequence

from client_app.delivery import taken
from client_app.site import Site
from espalier.modeling.opened import OpenedModel
from espalier.modeling.structured.opened_cut import open_cut
from espalier.wire.cuts import cut_specs
from espalier.wire.messages import Header
from espalier.wire.parts import parts_of
from espalier.wire.payload import block_key


def delivered_cut(
    site: Site, header: Header, biases: Sequence[str], scaled: Sequence[str] = ()
) -> OpenedModel:
    """Open the federated smaller model.

    Raises
    ------
    Mistake
        The server has not pushed all parts.
    """
    parts = parts_of(cut_specs(site.model.plan, biases, scaled), site.settings.part_bytes)
    store, hashes, _ = taken(site, header, len(parts))
    return open_cut(site.model, lambda index: store.get(hashes[block_key(index)]), biases)
