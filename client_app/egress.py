"""Nothing leaves a site but what its contract lists: this mod checks every reply before it is sent, and logs it.

Covers: replies of this ClientApp. What does not match the contract of its request (other tensors, shapes, dtypes,
scalars, too many bytes) is replaced by a failure reply that names the mismatch; each reply that leaves is logged with
time, run, round, kind, tensor names, dtypes, shapes, bytes and SHA-256, and one that cannot be logged does not leave.
Does not cover: other programs at the site, Flower's own traffic (node id, heartbeats, process logs that the SuperNode
keeps locally), or what the permitted tensors reveal by themselves (see each contract's ``observer``).
"""

import logging
from datetime import UTC, datetime
from typing import Any

from flwr.app import Context, Message
from flwr.clientapp.typing import ClientAppCallable

from client_app.simulated import in_simulation
from client_app.site import Site, egress_log
from espalier.settings.mistakes import Mistake
from espalier.settings.node import parse_node
from espalier.storage.blobs import sha256
from espalier.wire.contract import FAILED, check, check_reply
from espalier.wire.contracts import contract_for
from espalier.wire.messages import UNREAD, Letter, failure, num_bytes, read, write
from espalier.wire.payload import tensor_specs


def egress(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Flower mod around all handlers of the ClientApp."""
    try:
        request = read(message.content)
    except Mistake as mistake:
        return Message(write(failure(UNREAD, str(mistake))), reply_to=message)
    reply = call_next(message, context)
    try:
        letter = _checked(request, reply, context)
        _log(context, letter, reply)
    except Exception as error:  # what cannot be checked does not leave, whatever the reason
        told = error.outward if isinstance(error, Mistake) else f"unexpected {type(error).__name__}; see this node's log"
        logging.getLogger("espalier").warning("reply to %s held back: %s", request.header.kind, error)
        reason = f"held back by the site's egress check: {told}"
        return Message(write(failure(request.header, reason)), reply_to=message)
    return reply


def _checked(request: Letter, reply: Message, context: Context) -> Letter:
    """The reply, if it is a reply to the request and matches its contract."""
    if not reply.has_content():
        raise Mistake("the reply has no content")
    letter = read(reply.content)
    if letter.header.status == "failed":
        check(letter, FAILED)
    else:
        site = Site.of(context, request.header)
        check_reply(letter, request, contract_for(request, lambda: site.model.plan, site.settings))
    return letter


def _log(context: Context, letter: Letter, reply: Message) -> None:
    """Append one entry to the site's egress log."""
    try:
        node = parse_node(context.node_config, simulated=in_simulation())
    except Mistake:
        return  # the node's own settings are wrong, so there is no log to write to; only the reason for that leaves
    header = letter.header
    entry: dict[str, Any] = {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "lineage": header.lineage,
        "method": header.method,
        "round": header.server_round,
        "client": header.client,
        "kind": header.kind,
        "part": header.part,
        "status": header.status,
        "scalars": sorted(letter.scalars),
        "bytes": num_bytes(reply.content),
        "blobs": [_describe(key, blob) for key, blob in sorted(letter.blobs.items())],
    }
    try:
        egress_log(node, header.lineage).append(entry)
    except OSError as error:
        raise Mistake(f"the egress log cannot be written ({error.strerror}); check the node's state-dir") from None


def _describe(key: str, blob: bytes) -> dict[str, Any]:
    tensors = {name: {"dtype": spec.dtype, "shape": list(spec.shape)} for name, spec in tensor_specs(blob).items()}
    return {"name": key, "bytes": len(blob), "sha256": sha256(blob), "tensors": tensors}
