"""Rounds: send requests, pull replies one at a time, check them, send again, keep a quorum.

Flower loses a message that is in flight when its node restarts, so every message has a deadline of its own and is sent
again under a new id; handlers are idempotent. A client that fails, is late too often, or sends what its contract does
not allow loses its own contribution, with the reason on record; the round goes on while the quorum holds. A seat goes to
another node only when the node that holds it is gone, or let the last attempt's deadline pass too (see ``enrolment``).
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from flwr.app import Message
from flwr.serverapp import Grid

from espalier.amounts import count, duration
from espalier.flower.load_faults import could_not_load, load_remedy
from espalier.settings.mistakes import INTERRUPTS, Mistake
from espalier.settings.run import RunSettings
from espalier.storage.at_work import AtWork
from espalier.wire.contract import check_reply
from espalier.wire.contracts import contract_for
from espalier.wire.lifetime import REQUESTS_AHEAD, lifetime
from espalier.wire.messages import SCHEMA_VERSION, Header, Kind, Letter, Scalars, address, read
from espalier.wire.plan import ModelPlan
from espalier.wire.printable import printable
from strategies.engine.clock import Clock
from strategies.engine.progress import Progress
from strategies.engine.roster import Roster, Seat
from strategies.engine.run_folder import RunFolder

DAY = 86_400.0
POLL_SECONDS = 0.1
SELDOM_SECONDS = 0.5
"""How often to ask for a reply, and how often where none has come for a while; each question costs the SuperLink time."""
A_WHILE = 5.0
LOOK_SECONDS = 5.0
"""How often new nodes are looked for while replies are awaited."""
ROUND_SECONDS = DAY
ROUND_DEADLINES = 10
"""Limit of a round of real sites if ``round-seconds`` is 0: the larger of these seconds and this
multiple of all attempts of one message."""
SIMULATED_TTL = 30 * DAY
"""The same where messages queue for one machine's workers, however long that takes; Flower's own default is half a day."""
NAMED = 4
"""Of the clients that are waited for."""

TOLD_REASONS = 20
"""Clients whose reasons are told when the quorum is missed; ``summary.json`` has all."""

Patience = Callable[[Seat], float]

FollowUp = Callable[[Letter], Message | None]
"""What to ask a client next, after its first reply, or after a request that was made by this; None when there is no more."""


class RunFailed(RuntimeError):
    """The run cannot go on; its message says why. What was finished before stays on disk."""


@dataclass(eq=False)
class _Pending:
    request: Letter
    seat: Seat
    message_id: str | None
    """None while the message waits for its site's node to come back."""
    seconds: float
    """How long one attempt may take."""
    deadline: float
    node_id: int
    """The node that it was sent to."""
    since: float
    """Time at which its first attempt was sent."""


@dataclass
class Rounds:
    """The engine that all strategies share; it knows messages and time, not methods."""

    grid: Grid
    settings: RunSettings
    plan: ModelPlan
    lineage: str
    folder: RunFolder
    progress: Progress
    clock: Clock = field(default_factory=Clock)
    roster: Roster = field(default_factory=Roster)
    shared_workers: bool = False
    """Simulated clients queue for this machine's workers: their deadlines count from anybody's last reply or work."""
    work: AtWork | None = None
    """Of clients on this machine: who is at work, and what they say of it."""
    finished: int = 0
    """Rounds that are finished."""
    lost: dict[int, str] | None = None
    """Clients that said in this round that they lost their state, and why; None where it cannot be brought back."""
    ends: float = math.inf
    """Time at which the round, or the evaluation, ends for clients that have not answered."""
    evaluating: bool = False
    """Rounds are over: a client that fails now keeps its contribution."""
    look_for_nodes: Callable[[], None] = lambda: None
    """Asks nodes that are new who they are (see ``enrolment``)."""
    reseat: Callable[[Seat], None] = lambda _: None
    """Gives a seat whose node is gone, or silent to the last, to another node of its site, if there is one; for a while Flower
    lists a node that is gone beside the one that came for it."""

    def request(
        self,
        kind: Kind,
        seat: Seat,
        server_round: int,
        scalars: Scalars,
        blobs: dict[str, bytes] | None = None,
        part: int = 0,
    ) -> Message:
        """A first-attempt request to a client."""
        header = Header(
            schema_version=SCHEMA_VERSION,
            kind=kind,
            method=self.settings.method,
            lineage=self.lineage,
            server_round=server_round,
            client=seat.client,
            attempt=1,
            part=part,
            num_parts=1,
        )
        return self._envelope(Letter(header, scalars.model_dump(), blobs or {}), seat)

    def push(self, letter: Letter, seat: Seat, seconds: float = 0.0) -> str | None:
        """Send a letter to where its client is now, and return Flower's message id; None if Flower did not take it.

        ``seconds`` is how long its answer may take, if longer than other messages'.
        """
        message = self._envelope(letter, seat, seconds)
        self.folder.ledger.record("down", seat.client, letter, message.content)
        return next(iter(self.grid.push_messages([message])), None)

    def pull(self, message_id: str) -> Message | None:
        """The reply to one message, if it has arrived."""
        return next(iter(self.grid.pull_messages([message_id])), None)

    def _envelope(self, letter: Letter, seat: Seat, seconds: float = 0.0) -> Message:
        needed = lifetime(max(seconds, self.settings.deadline_seconds))
        return address(letter, seat.node_id, SIMULATED_TTL if self.shared_workers else needed)

    def begin(self, least: float = 0.0) -> None:
        """Begin a round, or what is asked after the rounds, which may take ``round-seconds``, but ``least`` seconds."""
        self.ends = self.clock.now() + max(self.round_seconds(), least)

    def round_seconds(self) -> float:
        """Return how long a round may take; simulated clients queue for this machine, however long that takes."""
        settings = self.settings
        if settings.round_seconds:
            return settings.round_seconds
        return (
            math.inf
            if self.shared_workers
            else max(ROUND_SECONDS, ROUND_DEADLINES * self._of_a_message())
        )

    def _of_a_message(self) -> float:
        """Return how long all attempts of a message may take."""
        return self.settings.deadline_seconds * self.settings.attempts

    def exchange(
        self,
        requests: Iterable[Message],
        follow_up: FollowUp = lambda _: None,
        patience: Patience = lambda _: 0.0,
    ) -> Iterator[Message]:
        """Send requests and yield each reply that its contract allows, as it arrives; clients that fail are dropped.

        Parameters
        ----------
        requests : one per client, made by ``request``
        follow_up : called with each client's first good reply, then with the requests that it made; what it returns is sent
            to the same client, at most ``REQUESTS_AHEAD`` at a time
        patience : how many seconds an answer of a client may take, where that is more than ``deadline-seconds``

        Yields
        ------
        Message
            One reply part at a time; the next is not pulled before this one is done with, but it is asked for.
        """
        pending = [self._send(read(message.content), patience) for message in requests]
        last: dict[int, Letter] = {}
        next_look = self.clock.now() + LOOK_SECONDS
        last_reply = self.clock.now()
        # who was not late in a round that is nearly over, is given as long as one message may take
        ends = max(self.ends, self.clock.now() + min(self._of_a_message(), self.round_seconds()))
        while pending:
            if self.clock.now() >= ends:
                self._end(pending)
                return
            idle = True
            for entry in list(pending):
                if entry not in pending:  # its client was dropped meanwhile
                    continue
                reply = self.pull(entry.message_id) if entry.message_id is not None else None
                if reply is None:
                    late = self.clock.now() >= entry.deadline and not self._work_goes_on(pending)
                    if entry.message_id is None or late:
                        self._send_again(entry, pending, _late(entry.seat), late=late)
                    continue
                idle = False
                last_reply = self.clock.now()
                if self.shared_workers:
                    self._restart_deadlines(pending)
                letter = self._accept(entry, reply, pending)
                if letter is not None:
                    pending.remove(entry)
                    self._ask_ahead(letter, pending, last, follow_up)
                    # It shares the reply's blobs, of which one part at a time is in memory.
                    letter = None
                    yield reply
                del reply
            if pending and idle:
                if not self._work_goes_on(pending):
                    self.progress.waiting(_waited_for(pending, self.clock.now()))
                if self.clock.now() >= next_look:
                    self.look_for_nodes()
                    next_look = self.clock.now() + LOOK_SECONDS
                self.clock.sleep(
                    POLL_SECONDS if self.clock.now() < last_reply + A_WHILE else SELDOM_SECONDS
                )

    def somebody_works(self) -> bool:
        """Whether a client is at work on this machine, for whose worker others may queue; shows what clients say of it."""
        if not self.shared_workers or self.work is None:
            return False
        for line in self.work.new_lines():
            self.progress.note("at_work", line)
        return self.work.anybody()

    def _work_goes_on(self, pending: list[_Pending]) -> bool:
        """Where clients queue for workers, nobody is late while one of them works."""
        if goes_on := self.somebody_works():
            self._restart_deadlines(pending)
        return goes_on

    def _restart_deadlines(self, pending: list[_Pending]) -> None:
        for entry in pending:
            entry.deadline = self.clock.now() + entry.seconds

    def _ask_ahead(
        self, letter: Letter, pending: list[_Pending], last: dict[int, Letter], follow_up: FollowUp
    ) -> None:
        """Send a client what comes next; it answers one request after the other, so a deadline counts from the one before.

        ``last`` holds the last request to each client that followed its first reply: parts may arrive in any order.
        """
        client = letter.header.client
        own = [entry for entry in pending if entry.seat.client == client]
        while (
            len(own) < REQUESTS_AHEAD
            and (following := follow_up(last.get(client, letter))) is not None
        ):
            last[client] = read(following.content)
            own.append(self._send(last[client]))
            pending.append(own[-1])
        for place, entry in enumerate(own, start=1):
            # One that was overtaken may be lost, and waits no longer.
            if entry.request.header.part > letter.header.part:
                entry.deadline = self.clock.now() + place * entry.seconds

    def _send(self, letter: Letter, patience: Patience = lambda _: 0.0) -> _Pending:
        seat = self.roster.seats[letter.header.client]
        seconds = max(patience(seat), self.settings.deadline_seconds)
        message_id = self.push(letter, seat, seconds)
        return _Pending(
            letter,
            seat,
            message_id,
            seconds,
            self.clock.now() + seconds,
            seat.node_id,
            self.clock.now(),
        )

    def _send_again(
        self, entry: _Pending, pending: list[_Pending], reason: str, *, late: bool
    ) -> None:
        """Send a request again to wherever its site now is; after the last attempt the client is dropped.

        ``attempts`` are the holder's of a seat. Where another node of its name takes the seat, as many more follow at most.
        """
        seat = entry.seat
        header = entry.request.header
        attempts = self.settings.attempts
        gone = seat.node_id not in self.grid.get_node_ids()
        if entry.node_id == seat.node_id and (gone or (late and header.attempt >= attempts)):
            self.reseat(seat)
            gone = seat.node_id not in self.grid.get_node_ids()
        if gone:
            if not late:
                entry.message_id = None
                return
            reason = "its node is not connected"
        # The seat has gone to another node, which was not asked yet.
        elsewhere = entry.node_id != seat.node_id
        if header.attempt >= (2 * attempts if elsewhere else attempts):
            self._give_up(
                entry,
                pending,
                f"{reason} ({header.attempt} of {count(max(header.attempt, attempts), 'attempt')})",
            )
            return
        text = f"sending again to {seat.site}: {reason}"
        self.progress.note(
            "sent_again",
            text,
            client=seat.client,
            kind=header.kind,
            attempt=header.attempt + 1,
            reason=reason,
        )
        again = Letter(
            header.model_copy(update={"attempt": header.attempt + 1}),
            entry.request.scalars,
            entry.request.blobs,
        )
        following = self._send(again, lambda _: entry.seconds)
        following.since = entry.since
        pending[pending.index(entry)] = following

    def _accept(self, entry: _Pending, reply: Message, pending: list[_Pending]) -> Letter | None:
        """Check a reply; None means that the client was dropped, is asked again, or is to catch up."""
        if not reply.has_content():
            self._send_again(entry, pending, error_of(reply), late=False)
            return None
        try:
            letter = self.checked(reply, entry.request, entry.seat)
        except Mistake as mistake:
            self._give_up(entry, pending, f"reply refused: {mistake}")
            return None
        if letter.header.status == "failed" and self._is_to_catch_up(entry, letter):
            pending[:] = [other for other in pending if other.seat is not entry.seat]
            return None
        if letter.header.status == "failed":
            self._give_up(entry, pending, str(letter.scalars["reason"]))
            return None
        return letter

    def _give_up(self, entry: _Pending, pending: list[_Pending], why: str) -> None:
        """Drop a client, and await nothing more of it."""
        pending[:] = [other for other in pending if other.seat is not entry.seat]
        self.drop(entry.request.header.kind, entry.seat, why)

    def _end(self, pending: list[_Pending]) -> None:
        """Drop the clients that have not answered when the round is over."""
        while pending:
            self._give_up(
                pending[0],
                pending,
                "no whole answer when the round was over (round-seconds ="
                f" {self.round_seconds():g})",
            )

    def drop(self, kind: Kind, seat: Seat, why: str) -> None:
        """A client is asked nothing more; its contribution is lost, unless it was made before."""
        reason = printable(f"{kind}: {why}")
        if self.evaluating:
            seat.leave_out(reason)
        else:
            seat.drop(reason)
        self.progress.note(
            "dropped",
            f"dropped      {seat.site}: {reason}",
            client=seat.client,
            site=seat.site,
            reason=reason,
        )

    def checked(self, reply: Message, request: Letter, seat: Seat) -> Letter:
        """The letter in a reply, in the ledger with its tensors; of one that is refused the ledger gets the bytes alone.

        Raises
        ------
        Mistake
            It is not what its contract allows; whatever a reply does to its reader, it costs its sender alone.
        OSError
            The ledger cannot be written; no reply is to blame for this server's disk.
        """
        try:
            letter = read(reply.content)
            check_reply(letter, request, contract_for(request, lambda: self.plan, self.settings))
        except (OSError, *INTERRUPTS):
            raise
        except BaseException as error:
            self.folder.ledger.record_refused(seat.client, request.header, reply.content)
            reason = (
                str(error) if isinstance(error, Mistake) else f"unexpected {type(error).__name__}"
            )
            raise Mistake(reason) from None
        self.folder.ledger.record("up", seat.client, letter, reply.content)
        return letter

    def _is_to_catch_up(self, entry: _Pending, letter: Letter) -> bool:
        """Whether a client lost what was brought to it and can be brought it again; once in a round."""
        seat = entry.seat
        header = entry.request.header
        reason = str(letter.scalars["reason"])
        if (
            self.lost is None
            or seat.client in self.lost
            or header.kind not in ("deliver", "train", "fetch")
        ):
            return False
        if not letter.scalars.get("lost"):
            return False
        client = seat.client
        self.lost[client] = reason
        self.progress.note(
            "lost",
            f"lost state   {seat.site}: {reason}",
            client=client,
            site=seat.site,
            reason=reason,
        )
        return True

    def require_quorum(self, number: int, what: str, of: int | None = None) -> None:
        """End the run if too few clients did something, of all or of ``of`` that were asked.

        Raises
        ------
        RunFailed
            With the reason of every client that did not.
        """
        asked = self.settings.num_clients if of is None else of
        needed = math.ceil(round(asked * (self.settings.quorum or 1.0), 6))
        if number >= needed:
            return
        reasons = [
            f"{seat.site}: {seat.reason}" for seat in self.roster.seats.values() if seat.reason
        ]
        reasons += [f"{who}: {why}" for who, why in self.roster.refused.items()]
        if (more := len(reasons) - TOLD_REASONS) > 0:
            reasons = [*reasons[:TOLD_REASONS], f"and {more} more; see summary.json"]
        lines = "".join(f"\n  {reason}" for reason in reasons)
        raise RunFailed(
            f"{count(number, 'client')} {what}, the quorum is {needed} of"
            f" {'num-clients =' if of is None else 'the'} {asked}{lines}"
        )


def error_of(reply: Message) -> str:
    """What Flower says in place of an answer, with the node's own words where it has any."""
    reason = printable(reply.error.reason or "")
    told = f"Flower reports error {reply.error.code}{f': {reason}' if reason else ''}"
    return f"{told}; the node {load_remedy()}" if could_not_load(reply) else told


def _waited_for(pending: list[_Pending], now: float) -> str:
    """Return who is waited for, a few of them by name; of sites whose replies a person approves also since when."""
    first: dict[str, _Pending] = {}
    for entry in pending:
        if entry.seat.site not in first or entry.since < first[entry.seat.site].since:
            first[entry.seat.site] = entry
    ordered = sorted(first.values(), key=lambda entry: (not entry.seat.approval, entry.seat.site))
    names = [_with_approval(entry, now) for entry in ordered[:NAMED]]
    return ", ".join(names) + (f" and {len(ordered) - NAMED} more" if len(ordered) > NAMED else "")


def _with_approval(entry: _Pending, now: float) -> str:
    if not entry.seat.approval:
        return entry.seat.site
    return (
        f"{entry.seat.site} (asked {duration(now - entry.since)} ago; its replies leave when a"
        " person there approves them)"
    )


def _late(seat: Seat) -> str:
    if not seat.approval:
        return "no reply before the deadline"
    return (
        "no reply before the deadline, and a person there approves its replies (espalier release);"
        " raise deadline-seconds"
    )
