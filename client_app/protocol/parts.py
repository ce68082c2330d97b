"""Replies in parts: computed once, stored in the client state, sent part by part."""

from client_app.site import Site, reply_to
from espalier.errors import InputError
from espalier.messages.contracts import contract_for
from espalier.messages.message import Letter, NoScalars


def hand_out(site: Site, request: Letter) -> Letter:
    """Answer a ``fetch`` with the blobs that the server names by hash.

    Raises
    ------
    InputError
        The number of hashes does not match the part, or a blob does not exist.
    """
    hashes = request.scalars["blob_sha256"]
    keys = sorted(
        contract_for(request, lambda: site.model.plan, site.settings).up.specs(NoScalars())
    )
    if len(hashes) != len(keys):
        raise InputError(
            f"fetch: part {request.header.part} has {len(keys)} blobs, {len(hashes)} were asked for"
        )
    store = site.state(request.header).blobs(request.header.server_round)
    return reply_to(
        request, NoScalars(), {key: store.get(blob) for key, blob in zip(keys, hashes, strict=True)}
    )
