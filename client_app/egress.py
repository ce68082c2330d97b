"""Nothing leaves a site but what its contract lists: this mod checks every reply before it is sent, and logs it.

Covers: replies of this ClientApp. What does not match the contract of its request (other tensors, shapes, dtypes, scalars,
too many bytes) is replaced by a failure reply that names the mismatch; what an officer has to release waits for that
(``hold``); each reply that leaves is logged with time, run, round, kind, tensor names, dtypes, shapes, bytes and SHA-256,
in a chain of hashes, and one that cannot be logged does not leave.
Does not cover: other programs at the site, Flower's own traffic (node id, heartbeats, process logs that the SuperNode keeps
locally), or what the permitted tensors reveal by themselves (see each contract's ``observer``).
"""

import logging

from flwr.app import Context, Message
from flwr.clientapp.typing import ClientAppCallable

from client_app import hold
from client_app.egress_log import egress_log, now, reply_entry
from client_app.simulated import in_simulation
from client_app.site import Site
from espalier.settings.mistakes import INTERRUPTS, Mistake
from espalier.settings.node import parse_node, site_id
from espalier.wire.contract import FAILED, check, check_reply
from espalier.wire.contracts import contract_for
from espalier.wire.messages import UNREAD, Letter, failure, read, write


def egress(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Flower mod around all handlers of the ClientApp.

    Raises
    ------
    StillHeldError
        An officer has not decided, and the server waits no longer: Flower tells it of an error, and it asks again.
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
        return _failed(message, context, request, f"held back by the site: {refused}")
    except INTERRUPTS:
        raise
    except BaseException as error:  # what cannot be checked does not leave, whatever the reason
        logging.getLogger("espalier").warning(
            "reply to %s held back: %s", request.header.kind, error
        )
        return _failed(
            message, context, request, f"held back by the site's egress check: {_reason(error)}"
        )
    return reply


def _reason(error: BaseException) -> str:
    """Return what others are told of an error: a mistake in its own words, any other error by its type."""
    return (
        error.outward
        if isinstance(error, Mistake)
        else f"unexpected {type(error).__name__}; see this node's log"
    )


def _failed(message: Message, context: Context, request: Letter, reason: str) -> Message:
    """What leaves in place of a reply: a sentence; also where the log is what fails, so that the server learns of it."""
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


def _released(letter: Letter, reply: Message, context: Context, waits_until: float) -> str:
    """By which word of an officer a reply leaves; empty where it needs none."""
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
    except Mistake:
        # The node's own settings are wrong, so there is no log to write to; only the reason for
        # that leaves.
        return
    entry = {"time": now(), **reply_entry(letter, reply.content)} | (
        {"released": released} if released else {}
    )
    try:
        egress_log(node.state_root(), letter.header.lineage, site_id(node)).append(entry)
    except OSError as error:
        raise Mistake(
            f"the egress log cannot be written ({error.strerror}); check the node's state-dir"
        ) from None
