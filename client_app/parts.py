"""Replies in parts: computed once, kept in the client's private state, handed out part by part."""

from client_app.site import Site, reply_to
from espalier.settings.mistakes import Mistake
from espalier.wire.contracts import contract_for
from espalier.wire.messages import Letter, NoScalars


def hand_out(site: Site, request: Letter) -> Letter:
    """Answer a ``fetch``: read the blobs that the server names by hash.

    Raises
    ------
    Mistake
        The number of hashes does not fit the part, or a blob is not there.
    """
    hashes = request.scalars["blob_sha256"]
    keys = sorted(
        contract_for(request, lambda: site.model.plan, site.settings).up.specs(NoScalars())
    )
    if len(hashes) != len(keys):
        raise Mistake(
            f"fetch: part {request.header.part} has {len(keys)} blobs, {len(hashes)} were asked for"
        )
    store = site.state(request.header).blobs(request.header.server_round)
    return reply_to(
        request, NoScalars(), {key: store.get(blob) for key, blob in zip(keys, hashes, strict=True)}
    )
