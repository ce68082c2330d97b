"""Replies in parts: computed once, stored in the client state, sent part by part."""

from client_app.site import Site, reply_to
from espalier.messages.message import MessageBody, NoFields


def hand_out(site: Site, request: MessageBody) -> MessageBody:
    """Answer a ``fetch`` with the blobs that the server names by hash.

    Raises
    ------
    InputError
        A blob does not exist.
    """
    hashes_of = site.contract.up.blob_sha256
    assert hashes_of is not None
    store = site.state(request.header).blobs(request.header.server_round)
    blobs = {key: store.get(blob) for key, blob in hashes_of(NoFields()).items()}
    return reply_to(request, NoFields(), blobs)
