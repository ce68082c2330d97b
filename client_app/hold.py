"""Replies that wait for an officer: with ``hold-replies`` in a node's configuration none of the kind leaves before its release.

A reply is computed and checked as ever; then it is kept (``storage/held.py``), the egress log says so, and the process
waits until ``espalier release`` decides, or until the server waits no longer for this attempt: then nothing is answered,
and the next attempt, which gets the same reply from what the round's work kept, finds the decision. A node that was started
again does so too.

Covers: what leaves is what was shown, by the hash of all of it; with the answer to a ``train`` the blobs of its further
parts are shown and decided on, and ``fetch`` hands out no others. A refused reply costs the site its contribution.
Does not cover: enrolment, failures, and answers without tensors and numbers, which say that a site is there and how it is
getting on; the times of all messages; a program that does not ask (see docs/privacy.md).
"""

import sys
import time
from collections.abc import Callable

from client_app.egress_log import described, egress_log, now
from client_app.no_answer import NoAnswerError
from client_app.site import Site
from espalier.settings.mistakes import Mistake
from espalier.storage.blobs import BlobStore, sha256
from espalier.storage.held import Decision, Held, HeldReplies
from espalier.wire.lifetime import seconds_of
from espalier.wire.messages import Letter

POLL_SECONDS = 0.25
"""How often a decision is looked for: whether a file is there."""
REFUSED = "an officer of the site did not release it"


class StillHeldError(NoAnswerError):
    """The server waits no longer for this attempt; the next one is answered from what is kept."""


class Refused(Mistake):
    """An officer decided that a reply does not leave."""


def is_to_be_held(site: Site, letter: Letter) -> bool:
    """Whether a reply of this site leaves by an officer's word alone."""
    holds = site.node.hold_replies
    header = letter.header
    if not holds or header.kind == "enrol" or header.status == "failed":
        return False
    return bool(letter.blobs) or (holds == "all" and bool(letter.scalars))


def released(site: Site, letter: Letter, entry: dict[str, object], waits_until: float) -> str:
    """Wait until a reply is released, and return under which id; what its round's ``train`` was released with needs no more.

    Parameters
    ----------
    entry : what the egress log will say of the reply
    waits_until : when the server waits no longer, on ``clock``

    Raises
    ------
    Refused
        It does not leave.
    StillHeldError
        Nobody decided in time.
    """
    state = site.state(letter.header)
    replies = HeldReplies(state.held())
    kept = state.blobs(letter.header.server_round)
    if letter.header.kind == "fetch":
        decided = replies.blobs_decided(letter.header.server_round)
        words = [decided.get(sha256(blob)) for blob in letter.blobs.values()]
        if False in words:
            raise Refused(REFUSED)
        if all(words):
            return "with its first part"
    held = _of(site, letter, entry, kept)
    decision = replies.decision(held)
    if decision is None and not replies.has(held):
        _log(site, held, "held")
        replies.add(held, {sha256(blob): blob for blob in letter.blobs.values()}, kept)
    if decision is None:
        decision = _awaited(site, held, replies, waits_until)
    if not decision.released:
        raise Refused(REFUSED)
    return held.id


def clock() -> float:
    """Seconds, from whenever on."""
    return time.monotonic()


def deadline(lifetime: float, started: float, kind: str) -> float:
    """When the server waits no longer for the answer to a message that came at ``started``, by how long Flower keeps it.

    A message reaches a site after the server began to wait, so this is no earlier. A ``fetch`` may have been sent ahead.
    """
    return started + seconds_of(lifetime) * (2 if kind == "fetch" else 1)


def _awaited(site: Site, held: Held, replies: HeldReplies, waits_until: float) -> Decision:
    what = f"{site.name}: {held.entry['kind']} of round {held.entry['round']}"
    _say(
        f"{what} is held as {held.id} until an officer decides: espalier release"
        f" {site.node.state_root()}"
    )
    while (decision := replies.decision(held)) is None:
        if clock() >= waits_until:
            _say(f"{what} is still held; the server is given no answer this time")
            raise StillHeldError("the reply waits for its release at the site")
        pause(min(POLL_SECONDS, max(0.0, waits_until - clock())))
    return decision


pause: Callable[[float], None] = time.sleep


def _of(site: Site, letter: Letter, entry: dict[str, object], kept: BlobStore) -> Held:
    """With the blobs of further parts: a report names the hashes of all of them, and they are at the site."""
    own = {sha256(blob) for blob in letter.blobs.values()}
    named = letter.scalars.get("blob_sha256", [])
    later = [described("", kept.get(key)) for key in dict.fromkeys(named) if key not in own]
    whose = {"lineage": letter.header.lineage, "site": site.name, "time": now()}
    return Held({**entry, **whose}, letter.scalars, later)


def _log(site: Site, held: Held, what: str) -> None:
    note_hold(
        egress_log(site.node.state_root(), held.entry["lineage"], held.entry["site"]).append,
        held,
        what,
    )


def note_hold(
    append: Callable[[dict[str, object]], object], held: Held, what: str, **more: str
) -> None:
    """Let the egress log say what becomes of a held reply.

    Raises
    ------
    OSError
        The log cannot be written.
    """
    which = {key: held.entry[key] for key in ("method", "round", "client", "kind", "part")}
    append(
        {
            "entry": what,
            "time": now(),
            "hold": held.id,
            "reply_sha256": held.digest,
            "held_bytes": held.num_bytes,
            **which,
            **more,
        }
    )


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
