"""Rounds: send requests, pull replies one at a time, check them, send again, keep a quorum.

Flower loses a message that is in flight when its node restarts, so every message has a deadline of its own and is sent
again under a new id; handlers are idempotent. A client that fails, is late too often, or sends what its contract does
not allow loses its own contribution, with the reason on record; the round goes on while the quorum holds.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from flwr.app import DEFAULT_TTL, Message
from flwr.serverapp import Grid

from espalier.settings.mistakes import Mistake
from espalier.settings.run import RunSettings
from espalier.wire.contract import check_reply
from espalier.wire.contracts import contract_for
from espalier.wire.messages import SCHEMA_VERSION, Header, Kind, Letter, Scalars, address, read
from espalier.wire.plan import ModelPlan
from strategies.clock import Clock
from strategies.progress import Progress
from strategies.roster import Roster, Seat
from strategies.run_folder import RunFolder

POLL_SECONDS = 0.1
LOOK_SECONDS = 5.0
"""How often new nodes are looked for while replies are awaited."""
TTL_MARGIN = 60.0
"""Seconds beyond the deadline after which Flower may forget a message."""

REQUESTS_AHEAD = 2
"""Requests that one client has at a time where its reply comes in parts. A SuperNode that finds no message when it looks sleeps
for three seconds (Flower 1.31), so the next one lies there before the last is answered; of the replies, too, the SuperLink
never holds more than these."""

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
    deadline: float


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
    """Simulated clients queue for this machine's workers: their deadlines count from anybody's last reply."""
    finished: int = 0
    """Rounds that are finished."""
    evaluating: bool = False
    """Rounds are over: a client that fails now keeps its contribution."""
    look_for_nodes: Callable[[], None] = lambda: None
    """Asks nodes that are new who they are (see ``enrolment``)."""
    seat_returned_nodes: Callable[[], None] = lambda: None
    """Seats sites that came back under another node id; for a while Flower lists their old nodes too."""

    def request(
        self, kind: Kind, seat: Seat, server_round: int, scalars: Scalars, blobs: dict[str, bytes] | None = None, part: int = 0
    ) -> Message:
        """A first-attempt request to a client."""
        header = Header(
            schema_version=SCHEMA_VERSION,
            kind=kind,
            method=self.settings.method,
            lineage=self.lineage,
            server_round=server_round,
            rank=seat.rank,
            attempt=1,
            part=part,
            num_parts=1,
        )
        return self._envelope(Letter(header, scalars.model_dump(), blobs or {}), seat)

    def push(self, letter: Letter, seat: Seat) -> str | None:
        """Send a letter to where its client is now, and return Flower's message id; None if Flower did not take it."""
        message = self._envelope(letter, seat)
        self.folder.ledger.record("down", seat.rank, letter, message.content)
        return next(iter(self.grid.push_messages([message])), None)

    def pull(self, message_id: str) -> Message | None:
        """The reply to one message, if it has arrived."""
        return next(iter(self.grid.pull_messages([message_id])), None)

    def _envelope(self, letter: Letter, seat: Seat) -> Message:
        ttl = DEFAULT_TTL if self.shared_workers else REQUESTS_AHEAD * self.settings.deadline_seconds + TTL_MARGIN
        return address(letter, seat.node_id, ttl)

    def exchange(self, requests: Iterable[Message], follow_up: FollowUp = lambda _: None) -> Iterator[Message]:
        """Send requests and yield each reply that its contract allows, as it arrives; clients that fail are dropped.

        Parameters
        ----------
        requests : one per client, made by ``request``
        follow_up : called with each client's first good reply, then with the requests that it made; what it returns is sent
            to the same client, at most ``REQUESTS_AHEAD`` at a time

        Yields
        ------
        Message
            One reply part at a time; the next is not pulled before this one is done with, but it is asked for.
        """
        pending = [self._send(read(message.content)) for message in requests]
        last: dict[int, Letter] = {}
        next_look = self.clock.now() + LOOK_SECONDS
        while pending:
            idle = True
            for entry in list(pending):
                if entry not in pending:  # its client was dropped meanwhile
                    continue
                reply = self.pull(entry.message_id) if entry.message_id is not None else None
                if reply is None:
                    if entry.message_id is None or self.clock.now() >= entry.deadline:
                        self._send_again(entry, pending, "no reply before the deadline")
                    continue
                idle = False
                if self.shared_workers:
                    self._restart_deadlines(pending)
                letter = self._accept(entry, reply, pending)
                if letter is not None:
                    pending.remove(entry)
                    self._ask_ahead(letter, pending, last, follow_up)
                    letter = None  # it shares the reply's blobs, of which one part at a time is in memory
                    yield reply
                del reply
            if pending and idle:
                if self.clock.now() >= next_look:
                    self.look_for_nodes()
                    next_look = self.clock.now() + LOOK_SECONDS
                self.clock.sleep(POLL_SECONDS)

    def _restart_deadlines(self, pending: list[_Pending]) -> None:
        for entry in pending:
            entry.deadline = self.clock.now() + self.settings.deadline_seconds

    def _ask_ahead(self, letter: Letter, pending: list[_Pending], last: dict[int, Letter], follow_up: FollowUp) -> None:
        """Send a client what comes next; it answers one request after the other, so a deadline counts from the one before.

        ``last`` holds the last request to each client that followed its first reply: parts may arrive in any order.
        """
        rank = letter.header.rank
        own = [entry for entry in pending if entry.seat.rank == rank]
        while len(own) < REQUESTS_AHEAD and (following := follow_up(last.get(rank, letter))) is not None:
            last[rank] = read(following.content)
            own.append(self._send(last[rank]))
            pending.append(own[-1])
        for place, entry in enumerate(own, start=1):
            if entry.request.header.part > letter.header.part:  # one that was overtaken may be lost, and waits no longer
                entry.deadline = self.clock.now() + place * self.settings.deadline_seconds

    def _send(self, letter: Letter) -> _Pending:
        seat = self.roster.seats[letter.header.rank]
        return _Pending(letter, seat, self.push(letter, seat), self.clock.now() + self.settings.deadline_seconds)

    def _send_again(self, entry: _Pending, pending: list[_Pending], reason: str) -> None:
        """Send a request again to wherever its site now is; after the last attempt the client is dropped."""
        seat, header = entry.seat, entry.request.header
        self.seat_returned_nodes()
        if seat.node_id not in self.grid.get_node_ids():
            if self.clock.now() < entry.deadline:
                entry.message_id = None
                return
            reason = "its node is not connected"
        if header.attempt >= self.settings.attempts:
            self._give_up(entry, pending, f"{reason} ({header.attempt} of {self.settings.attempts} attempts)")
            return
        text = f"sending again to {seat.site}: {reason}"
        self.progress.note("sent_again", text, rank=seat.rank, kind=header.kind, attempt=header.attempt + 1, reason=reason)
        again = Letter(header.model_copy(update={"attempt": header.attempt + 1}), entry.request.scalars, entry.request.blobs)
        pending[pending.index(entry)] = self._send(again)

    def _accept(self, entry: _Pending, reply: Message, pending: list[_Pending]) -> Letter | None:
        """Check a reply; None means that the client was dropped or is asked again."""
        if not reply.has_content():
            self._send_again(entry, pending, f"Flower reports error {reply.error.code}")
            return None
        try:
            letter = read(reply.content)
            self.folder.ledger.record("up", entry.seat.rank, letter, reply.content)
            check_reply(letter, entry.request, contract_for(entry.request, self.plan, self.settings))
        except OSError:  # no reply is to blame for this server's disk
            raise
        except Exception as error:  # whatever a reply does to its reader, it costs its sender alone
            reason = str(error) if isinstance(error, Mistake) else f"unexpected {type(error).__name__}"
            self._give_up(entry, pending, f"reply refused: {reason}")
            return None
        if letter.header.status == "failed":
            self._give_up(entry, pending, str(letter.scalars["reason"]))
            return None
        return letter

    def _give_up(self, entry: _Pending, pending: list[_Pending], why: str) -> None:
        """Drop a client, and await nothing more of it."""
        pending[:] = [other for other in pending if other.seat is not entry.seat]
        self.drop(entry.request.header.kind, entry.seat, why)

    def drop(self, kind: Kind, seat: Seat, why: str) -> None:
        """A client is asked nothing more; its contribution is lost, unless it was made before."""
        reason = f"{kind}: {why}"
        if self.evaluating:
            seat.leave_out(reason)
        else:
            seat.drop(reason)
        self.progress.note("dropped", f"dropped      {seat.site}: {reason}", rank=seat.rank, site=seat.site, reason=reason)

    def require_quorum(self, number: int, what: str, of: int | None = None) -> None:
        """End the run if too few clients did something, of all or of ``of`` that were asked.

        Raises
        ------
        RunFailed
            With the reason of every client that did not.
        """
        asked = self.settings.num_clients if of is None else of
        needed = math.ceil(round(asked * self.settings.quorum, 6))
        if number >= needed:
            return
        reasons = [f"{seat.site}: {seat.reason}" for seat in self.roster.seats.values() if seat.reason]
        reasons += [f"{who}: {why}" for who, why in self.roster.refused.items()]
        lines = "".join(f"\n  {reason}" for reason in reasons)
        raise RunFailed(
            f"{number} clients {what}, the quorum is {needed} of {'num-clients =' if of is None else 'the'} {asked}{lines}"
        )
