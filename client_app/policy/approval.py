"""Approval of replies: with ``require-approval``, a reply waits at the site for a person.

A reply is computed and checked as usual. It is then stored (``storage/waiting_replies.py``) and
recorded in the egress log. The process waits until ``espalier approve`` decides, or until the
server stops waiting for this attempt. In the second case there is no answer; the next attempt
produces the same reply from the stored work of the round, and finds the decision. A restarted node
continues in the same way.

Covers: the reply that leaves is the reply that was shown, verified by a hash of all its contents.
The approval of a ``train`` reply includes the blobs of its further parts, and ``fetch`` returns no
others. With secure sums a person sees the plain tensors, once, before the site's keys leave; the
masked tensors and shares of the round leave only after that. The contribution of a site whose reply
is refused is missing in the round.

Does not cover: enrolment, failure replies, and replies without tensors and numbers, which only show
that a site is active; the times of all messages; a program that does not ask for approval (see
docs/privacy/reference.md).
"""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from client_app.policy.egress_log import described, egress_log, now
from client_app.site import Site
from espalier.errors import EspalierError, NoAnswerError
from espalier.messages.ledger import seconds_of
from espalier.messages.message import Header, MessageBody
from espalier.messages.sums.secure_sum import KINDS as SECURE_KINDS
from espalier.messages.tensor_blobs import tensor_specs
from espalier.storage.blobs import BlobStore
from espalier.storage.waiting_replies import Decision, WaitingReplies, WaitingReply

POLL_SECONDS = 0.25
"""Interval in seconds between checks for a decision, each of which looks for a file."""


class NotDecidedError(NoAnswerError):
    """Error for an attempt that ends without a decision; the next attempt uses the stored reply."""


class Refused(EspalierError):
    """Decision of a person that a reply does not leave."""

    def __init__(self) -> None:
        super().__init__("it was not approved")


def needs_approval(site: Site, body: MessageBody) -> bool:
    """Return whether a reply of this site needs approval."""
    required = site.node.require_approval
    header = body.header
    if not required or header.kind == "enrol" or header.status == "failed":
        return False
    # A person decides on the plain tensors, before the other sites mask theirs together with them.
    if header.kind in SECURE_KINDS or _in_secure_sum(site, header):
        return True
    # Messages without blobs and numbers show nothing of the data.
    return bool(body.blobs) or (required == "all" and bool(body.fields))


def approved(site: Site, body: MessageBody, entry: Mapping[str, Any], waits_until: float) -> str:
    """Wait until a reply is approved, and return the id of the approval.

    A ``fetch``, and all messages of a secure sum, need no approval of their own if the tensors were
    approved with the round's ``train`` reply. It returns the text ``with its first part`` then.
    ``entry`` is the reply's entry of the egress log.

    Raises
    ------
    Refused
        The reply was refused.
    NotDecidedError
        There was no decision until ``waits_until``, a time on ``clock``.
    """
    state = site.state(body.header)
    # Replies are stored on the disk, so a restarted node finds them.
    replies = WaitingReplies(state.waiting())
    kept = state.blobs(body.header.server_round)
    hashes = {blob["name"]: blob["sha256"] for blob in entry["blobs"]}
    masked = body.header.kind in SECURE_KINDS
    secret = masked or _in_secure_sum(site, body.header)
    # Blobs that leave later are shown with the first reply.
    others = _plain_hashes(site, body.header) if secret else body.fields.get("blob_sha256", [])
    if secret or body.header.kind == "fetch":
        decided = replies.blobs_decided(body.header.server_round)
        # Every single blob needs a decision; one that was refused blocks the reply.
        words = [decided.get(digest) for digest in (others if secret else hashes.values())]
        # A new session of a secure sum has other keys and the same tensors.
        if False in words or (masked and not (words and all(words))):
            raise Refused
        if all(words):
            return "with its first part"
    waiting = _of(site, body, entry, hashes, others, kept)
    # An earlier attempt may have been decided on while no process waited.
    decision = replies.decision(waiting)
    if decision is None:
        # The log has the reply before a person can see it.
        if not replies.has(waiting):
            log_approval(site.node.state_root(), waiting, "waiting")
            replies.add(waiting, {hashes[key]: blob for key, blob in body.blobs.items()}, kept)
        decision = _awaited(site, waiting, replies, waits_until)
    if not decision.approved:
        raise Refused
    return waiting.id


clock: Callable[[], float] = time.monotonic
pause: Callable[[float], None] = time.sleep
"""Clock and sleep, both in seconds, which tests replace."""


def deadline(lifetime: float, started: float, kind: str) -> float:
    """Return the time at which the server stops waiting for the answer to a message.

    The server begins to wait before the message arrives at ``started``, so its real deadline is not
    later than this one. ``lifetime`` is the number of seconds that Flower keeps the message. A
    ``fetch`` may have been sent in advance; its lifetime counts twice.
    """
    return started + seconds_of(lifetime) * (2 if kind in ("fetch", "masked") else 1)


def _awaited(
    site: Site, waiting: WaitingReply, replies: WaitingReplies, waits_until: float
) -> Decision:
    what = f"{site.name}: {waiting.entry['kind']} of round {waiting.entry['round']}"
    _say(f"{what} waits for approval as {waiting.id}: espalier approve {site.node.state_root()}")
    while (decision := replies.decision(waiting)) is None:
        if clock() >= waits_until:
            _say(f"{what} still waits for approval; the server gets no answer this time")
            raise NotDecidedError("the reply waits for approval at the site")
        # Not beyond the deadline, so that the next attempt finds no process that still waits.
        pause(min(POLL_SECONDS, max(0.0, waits_until - clock())))
    return decision


def _of(
    site: Site,
    body: MessageBody,
    entry: Mapping[str, Any],
    hashes: Mapping[str, str],
    others: Sequence[str],
    kept: BlobStore,
) -> WaitingReply:
    """Return the reply with descriptions of all its blobs, including those that leave later.

    With secure sums these are the plain tensors, which leave masked.
    """
    # Each blob once; those of this reply are described in its entry.
    blobs = {key: kept.get(key) for key in dict.fromkeys(others) if key not in hashes.values()}
    later = [described("", blob, key, tensor_specs(blob)) for key, blob in blobs.items()]
    whose = {"lineage": body.header.lineage, "site": site.name, "time": now()}
    return WaitingReply({**entry, **whose}, body.fields, later)


def _in_secure_sum(site: Site, header: Header) -> bool:
    """Return whether a reply announces tensors that leave masked."""
    return header.kind == "train" and site.settings.federation.secure_sum


def _plain_hashes(site: Site, header: Header) -> list[str]:
    """Return the hashes of the plain tensors of a round, which stay at the site."""
    kept = site.state(header).load(header.server_round, "train")
    return list(kept["report"]["blob_sha256"]) if kept else []


def log_approval(root: Path, waiting: WaitingReply, what: str, **more: str) -> None:
    """Append the state of a reply that needs approval to the egress log below ``root``.

    OSError names the log if it cannot be written.
    """
    which = {key: waiting.entry[key] for key in ("method", "round", "client", "kind", "part")}
    egress_log(root, waiting.entry["lineage"], waiting.entry["site"]).append(
        {
            "entry": what,
            "time": now(),
            "waiting_id": waiting.id,
            "reply_sha256": waiting.digest,
            "waiting_bytes": waiting.num_bytes,
            **which,
            **more,
        }
    )


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
