"""Transfers in parts through the client state: pushed results, and replies."""

from client_app.site import Site, reply_to
from espalier.errors import InputError
from espalier.messages.message import Header, MessageBody, NoFields
from espalier.storage.blobs import BlobStore


def store_part(site: Site, request: MessageBody) -> MessageBody:
    """Answer a ``push``: store the part.

    A part that is sent again has the same content and overwrites the first copy.
    """
    header = request.header
    state = site.state(header)
    # The state's lock, because parts of several messages may arrive at once.
    with state.locked():
        store = state.blobs(header.server_round)
        hashes = {key: store.put(blob) for key, blob in request.blobs.items()}
        state.save(
            header.server_round, _name(header.part), {"blobs": hashes, "fields": request.fields}
        )
    return reply_to(request, NoFields())


def pushed_parts(
    site: Site, header: Header, num_parts: int, first: int = 0
) -> tuple[BlobStore, dict[str, str], list[dict[str, object]]]:
    """Return the parts that the server pushed, beginning with part ``first``.

    These are the store of the blobs, the SHA-256 of each blob by key, and the fields of each part.
    Raises InputError if the server has not pushed all parts.
    """
    state = site.state(header)
    parts = [
        state.load(header.server_round, _name(part)) for part in range(first, first + num_parts)
    ]
    # All parts are needed; a part without content has a document too.
    if (pushed := [part for part in parts if part is not None]) != parts:
        raise InputError(
            f"{header.kind}: {len(pushed)} of {num_parts} parts of the federated result were pushed"
        )
    hashes = {key: blob for part in pushed for key, blob in part["blobs"].items()}
    return state.blobs(header.server_round), hashes, [part["fields"] for part in pushed]


def pushed_blobs(site: Site, header: Header, num_parts: int) -> dict[str, bytes]:
    """Return the blobs of ``pushed_parts``, by key."""
    store, hashes, _ = pushed_parts(site, header, num_parts)
    return {key: store.get(blob) for key, blob in hashes.items()}


def result_header(header: Header) -> Header:
    """Return the header under which the result of a round is pushed: that of the next round."""
    return header.model_copy(update={"server_round": header.server_round + 1})


def start_blobs(site: Site, request: MessageBody, first: int = 0) -> dict[str, bytes]:
    """Return the blobs that the work on a ``train`` request begins with.

    All parts but the last were pushed before; the last part is in the request. Without blobs in the
    request, the work begins without any.
    """
    store = site.state(request.header).blobs(request.header.server_round)
    hashes = start_hashes(site, request, first)
    # Blobs of the request have precedence.
    return {key: store.get(blob) for key, blob in hashes.items()} | request.blobs


def start_hashes(site: Site, request: MessageBody, first: int = 0) -> dict[str, str]:
    """Return the SHA-256 of the blobs in the pushed parts of ``start_blobs``, by key.

    Both directions have the same parts, and ``first`` is the number of the first one.
    """
    # The last part is in the request itself.
    num_parts = site.contract.num_parts - 1 if request.blobs else 0
    _, hashes, _ = pushed_parts(site, request.header, num_parts, first)
    return hashes


def _name(part: int) -> str:
    return f"pushed-{part:04d}"


def answer_fetch(site: Site, request: MessageBody) -> MessageBody:
    """Answer a ``fetch`` with the blobs that the server names by hash."""
    hashes_of = site.contract.up.blob_sha256
    assert hashes_of is not None
    store = site.state(request.header).blobs(request.header.server_round)
    blobs = {key: store.get(blob) for key, blob in hashes_of(NoFields()).items()}
    return reply_to(request, NoFields(), blobs)
