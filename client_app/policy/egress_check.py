"""Egress check: only content that its contract lists leaves a site.

Every reply of this ClientApp is checked before it is sent, and logged.

Covers: all replies of this ClientApp. A reply that does not match the contract of its request
(other tensors, shapes, dtypes or fields, too many bytes) is replaced by a failure reply that names
the mismatch. A reply that needs approval waits for it (``approval``). Each reply that leaves is
logged with time, run, round, kind, tensor names, dtypes, shapes, bytes and SHA-256, in a hash
chain. A reply that cannot be logged does not leave.

Does not cover: other programs at the site, Flower's own traffic (node id, heartbeats, process logs
that the SuperNode keeps locally), and what the permitted tensors themselves reveal (see
``observer`` of each contract).
"""

import logging

from flwr.app import RecordDict

from client_app.policy import approval
from client_app.policy.egress_log import egress_log, now, reply_entry
from client_app.site import Site
from espalier.errors import INTERRUPTS, EspalierError, InputError
from espalier.messages.contract import FAILED, check, check_reply
from espalier.messages.message import MessageBody, failure
from espalier.messages.records import write


def egress(site: Site, body: MessageBody, waits_until: float) -> RecordDict:
    """Check, approve and log a reply, and return the records that leave the site.

    They are the reply, or a failure reply with the reason why it does not leave.

    Raises
    ------
    NotDecidedError
        There was no decision on the reply until ``waits_until``, on the clock of ``approval``.
        Flower reports an error to the server, which asks again.
    """
    assert site.request is not None
    try:
        failed = body.header.status == "failed"
        side = FAILED if failed else site.contract.up
        # A failure has a contract too: its text is all that may leave.
        fields = check(body, FAILED) if failed else check_reply(body, site.request, site.contract)
        # Serialised before the log entry: the entry describes the bytes that leave.
        content = write(body)
        entry = reply_entry(body, content, side, fields)
        # A person decides before the entry says that the reply has left.
        if approval.needs_approval(site, body):
            entry["approved"] = approval.approved(site, body, entry, waits_until)
        # The last step: what is not in the log does not leave.
        _log(site, body, entry)
    except (approval.NotDecidedError, *INTERRUPTS):
        raise
    except approval.Refused as refused:
        return _failed(site, f"blocked by the site: {refused}")
    # A reply that cannot be checked does not leave, for whatever reason.
    except BaseException as error:
        logging.getLogger("espalier").warning(
            "reply to %s blocked: %s", site.request.header.kind, error
        )
        return _failed(site, f"blocked by the site's egress check: {reason_of(error)}")
    return content


def reason_of(error: BaseException) -> str:
    """Return the error text for the server: an EspalierError's message, else only its type."""
    return (
        error.outward
        if isinstance(error, EspalierError)
        else f"unexpected {type(error).__name__}; see this node's log"
    )


def _failed(site: Site, reason: str) -> RecordDict:
    """Return a failure reply with a reason; it is sent even if the log cannot be written."""
    assert site.request is not None
    body = failure(site.request.header, reason)
    content = write(body)
    try:
        _log(site, body, reply_entry(body, content, FAILED, check(body, FAILED)))
    except INTERRUPTS:
        raise
    except BaseException as error:
        logging.getLogger("espalier").warning("a failure was not logged: %s", error)
    return content


def _log(site: Site, body: MessageBody, entry: dict[str, object]) -> None:
    try:
        egress_log(site.node.state_root(), body.header.lineage, site.name).append(
            {"time": now(), **entry}
        )
    except OSError as error:
        raise InputError(
            f"the egress log cannot be written ({error.strerror}); check the node's state-dir"
        ) from None
