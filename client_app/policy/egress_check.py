"""Egress check: only content that its contract lists leaves a site.

This Flower mod checks every reply before it is sent, and logs it.

Covers: all replies of this ClientApp. A reply that does not match the contract of its request
(other tensors, shapes, dtypes or fields, too many bytes) is replaced by a failure reply that names
the mismatch. A reply that needs approval waits for it (``hold``). Each reply that leaves is logged
with time, run, round, kind, tensor names, dtypes, shapes, bytes and SHA-256, in a hash chain. A
reply that cannot be logged does not leave.

Does not cover: other programs at the site, Flower's own traffic (node id, heartbeats, process logs
that the SuperNode keeps locally), and what the permitted tensors themselves reveal (see
``observer`` of each contract).
"""

import logging

from flwr.app import Context, Message
from flwr.clientapp.typing import ClientAppCallable

from client_app.policy import approval as hold
from client_app.policy.egress_log import egress_log, now, reply_entry
from client_app.simulated import in_simulation
from client_app.site import Site
from espalier.errors import INTERRUPTS, EspalierError, InputError
from espalier.messages.contract import FAILED, check, check_reply
from espalier.messages.contracts import contract_for
from espalier.messages.message import UNREAD, Letter, failure, read, write
from espalier.settings.node import parse_node


def egress(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Check, approve and log the reply of a handler; Flower mod around all handlers.

    Raises
    ------
    StillHeldError
        There was no decision on the reply in time, and the server stops waiting. Flower reports an
        error to the server, which asks again.
    """
    started = hold.clock()
    try:
        request = read(message.content)
    except INTERRUPTS:
        raise
    except BaseException as error:
        logging.getLogger("espalier").warning("a message could not be read: %s", error)
        return Message(write(failure(UNREAD, _reason(error))), reply_to=message)
    reply = call_next(message, context)
    try:
        letter = _checked(request, reply, context)
        waits_until = hold.deadline(message.metadata.ttl, started, request.header.kind)
        _log(context, letter, reply, _released(letter, reply, context, waits_until))
    except hold.StillHeldError:
        raise
    except hold.Refused as refused:
        return _failed(message, context, request, f"blocked by the site: {refused}")
    except INTERRUPTS:
        raise
    # A reply that cannot be checked does not leave, for whatever reason.
    except BaseException as error:
        logging.getLogger("espalier").warning("reply to %s blocked: %s", request.header.kind, error)
        return _failed(
            message, context, request, f"blocked by the site's egress check: {_reason(error)}"
        )
    return reply


def _reason(error: BaseException) -> str:
    """Return the error text for the server: a InputError's message, else only the error's type."""
    return (
        error.outward
        if isinstance(error, EspalierError)
        else f"unexpected {type(error).__name__}; see this node's log"
    )


def _failed(message: Message, context: Context, request: Letter, reason: str) -> Message:
    """Return a failure reply with a reason, in place of the reply itself.

    It is sent even if the log cannot be written, so that the server learns of that error.
    """
    letter = failure(request.header, reason)
    reply = Message(write(letter), reply_to=message)
    try:
        _log(context, letter, reply, "")
    except INTERRUPTS:
        raise
    except BaseException as error:
        logging.getLogger("espalier").warning("a failure was not logged: %s", error)
    return reply


def _checked(request: Letter, reply: Message, context: Context) -> Letter:
    """Return the reply if it answers the request and matches its contract; raise otherwise."""
    if not reply.has_content():
        raise InputError("the reply has no content")
    letter = read(reply.content)
    if letter.header.status == "failed":
        check(letter, FAILED)
    else:
        site = Site.of(context, request.header)
        check_reply(letter, request, contract_for(request, lambda: site.model.plan, site.settings))
    return letter


def _released(letter: Letter, reply: Message, context: Context, waits_until: float) -> str:
    """Wait for approval if the reply needs it.

    Returns
    -------
    str
        Id of the approval, empty if the reply needs none.
    """
    if letter.header.status == "failed":
        return ""
    site = Site.of(context, letter.header)
    if not hold.is_to_be_held(site, letter):
        return ""
    return hold.released(site, letter, reply_entry(letter, reply.content), waits_until)


def _log(context: Context, letter: Letter, reply: Message, released: str) -> None:
    """Append one entry to the site's egress log."""
    try:
        node = parse_node(context.node_config, simulated=in_simulation())
    except EspalierError:
        # The node's own settings are invalid, so there is no log to write to. Only the reason for
        # that leaves.
        return
    entry = {"time": now(), **reply_entry(letter, reply.content)} | (
        {"released": released} if released else {}
    )
    try:
        egress_log(node.state_root(), letter.header.lineage, node.site).append(entry)
    except OSError as error:
        raise InputError(
            f"the egress log cannot be written ({error.strerror}); check the node's state-dir"
        ) from None
