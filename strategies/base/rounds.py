"""Rounds: send requests, receive and check replies one at a time, send again, require a quorum.

Flower loses a message that is in flight when its node restarts. So every message has its own
deadline and is sent again under a new id; client handlers are idempotent. A client loses its
contribution, with a recorded reason, if it fails, misses too many deadlines, or sends a reply that
its contract does not allow. The round continues as long as the quorum is met. A seat moves to
another node only when its node is gone or has missed the deadline of the last attempt too (see
``enrolment``).
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol

from flwr.app import Message
from flwr.serverapp import Grid

from espalier.amounts import count, duration
from espalier.errors import INTERRUPTS, EspalierError, InputError
from espalier.flower.load_faults import could_not_load, load_remedy
from espalier.identity.names import printable
from espalier.messages.contract import Contract, check_reply
from espalier.messages.contracts import contract_for
from espalier.messages.ledger import REQUESTS_AHEAD, lifetime
from espalier.messages.message import Fields, Kind, MessageBody, request_header
from espalier.messages.records import address, read
from espalier.messages.sums.secure_sum import SESSION
from espalier.models.plan import ModelPlan
from espalier.settings.run import RunSettings
from espalier.storage.activity import AtWork
from strategies.base.progress import Clock, Progress
from strategies.base.roster import Roster, Seat
from strategies.base.run_folder import RunFolder

DAY = 86_400.0
POLL_SECONDS = 0.1
SELDOM_SECONDS = 0.5
"""Seconds between two polls: while replies arrive, and after ``A_WHILE`` seconds without one.

Each poll costs the SuperLink time.
"""
A_WHILE = 5.0
LOOK_SECONDS = 5.0
"""Seconds between two searches for new nodes while the server waits for replies."""
ROUND_SECONDS = DAY
ROUND_DEADLINES = 10
"""Limit of a round of real sites if ``round-seconds`` is 0.

The limit is the larger of ``ROUND_SECONDS`` and this multiple of the time of all attempts of one
message.
"""
SIMULATED_TTL = 30 * DAY
"""Lifetime of a message in a simulation, in seconds.

Messages queue for the workers of one machine, however long that takes; Flower's own default is half
a day.
"""
NAMED = 4
"""Maximum number of clients that a progress line names."""

MAX_REASONS = 20
"""Maximum number of reasons in the error for a missed quorum; ``summary.json`` has all."""

Patience = Callable[[Seat], float]


@dataclass
class Request(MessageBody):
    """Request to a client, with the contract of the exchange."""

    make_contract: Callable[[MessageBody], Contract] = field(
        kw_only=True, compare=False, repr=False
    )

    @cached_property
    def contract(self) -> Contract:
        """Contract of the request and its reply."""
        return self.make_contract(self)


@dataclass
class Reply(MessageBody):
    """Checked reply of a client, with the contract of its request."""

    contract: Contract = field(kw_only=True, compare=False, repr=False)


FollowUp = Callable[[Reply | Request], Request | None]
"""Return the next request to a client after its first reply or a later request, or None."""


class Seating(Protocol):
    """Assignment of nodes to seats during a run (see ``enrolment``)."""

    def look_for_nodes(self) -> None:
        """Ask new nodes for their names."""

    def reseat(self, seat: Seat) -> None:
        """Move a seat to another node of its site, if there is one.

        It is called if the seat's node is gone or missed the last deadline. Flower lists a dead
        node for a while, together with its replacement.
        """


class RunFailed(RuntimeError):
    """Error that ends a run; the message gives the reason. Finished rounds stay on disk."""


@dataclass(eq=False)
class _Pending:
    request: Request
    seat: Seat
    message_id: str | None
    """Flower's message id; None while the message waits for the site's node to reconnect."""
    seconds: float
    """Seconds that one attempt may take."""
    deadline: float
    node_id: int
    """Node to which the message was sent."""
    since: float
    """Time at which the first attempt was sent."""


@dataclass
class Rounds:
    """Message exchange of a run, shared by all strategies; it has no code for single methods."""

    grid: Grid
    settings: RunSettings
    plan: ModelPlan
    """Plan of the clients' model, for contracts; it may be another than that of the base."""
    lineage: str
    folder: RunFolder
    progress: Progress
    clock: Clock = field(default_factory=Clock)
    roster: Roster = field(default_factory=Roster)
    shared_workers: bool = False
    """True in a simulation, where clients queue for this machine's workers.

    Their deadlines count from the last reply or work of any client.
    """
    work: AtWork | None = None
    """Log of the simulated clients' work on this machine; None in a deployment."""
    finished: int = field(default=0, init=False)
    """Number of finished rounds."""
    lost: dict[int, str] | None = None
    """Clients that reported lost state in this round, with the reason.

    None if the state of this round cannot be restored.
    """
    catching_up: set[int] = field(default_factory=set)
    """Clients among ``lost`` that are receiving their state again."""
    ends: float = math.inf
    """Time at which the round or the evaluation ends for clients that have not answered."""
    _over: bool = field(default=False, init=False)
    """True after the last round: a client that fails now keeps its contribution."""
    _seating: Seating | None = field(default=None, init=False)
    _next_look: float = field(default=0.0, init=False)
    """Time of the next search for new nodes."""

    def seat_with(self, seating: Seating) -> None:
        """Let ``seating`` find nodes and move seats while replies are awaited."""
        self._seating = seating

    def clients_have(self, plan: ModelPlan) -> None:
        """Make contracts for clients that have a model with this plan, in place of the base."""
        self.plan = plan

    def finish(self, server_round: int) -> None:
        """Record that a round and all before it are finished."""
        self.finished = server_round

    def request(
        self,
        kind: Kind,
        client: int,
        server_round: int,
        fields: Fields,
        blobs: Mapping[str, bytes] | None = None,
        part: int = 0,
        session: str = "",
    ) -> Request:
        """Return the first attempt of a request to a client; ``session``: that of a secure sum."""
        header = request_header(
            self.settings.method, kind, server_round, client, part, self.lineage
        )
        values = fields.model_dump() | ({SESSION: session} if session else {})
        return Request(header, values, dict(blobs or {}), make_contract=self._contract)

    def _contract(self, request: MessageBody) -> Contract:
        return contract_for(request, lambda: self.plan, self.settings)

    def send(self, body: MessageBody, node_id: int, seconds: float = 0.0) -> str | None:
        """Send a request to a node.

        The answer may take ``seconds``, or ``deadline-seconds`` if that is more. Returns Flower's
        message id, or None if Flower did not accept the message.
        """
        # A message lives in the SuperLink at least as long as its answer is waited for.
        needed = lifetime(max(seconds, self.settings.deadline_seconds))
        message = address(body, node_id, SIMULATED_TTL if self.shared_workers else needed)
        # Counted when it is sent: lost messages and repetitions cost bytes too.
        self.folder.ledger.record("down", body.header.client, body, message.content)
        return next(iter(self.grid.push_messages([message])), None)

    def pull(self, message_id: str) -> Message | None:
        """Return the reply to a message, or None if it has not arrived."""
        return next(iter(self.grid.pull_messages([message_id])), None)

    def begin(self, least: float = 0.0, *, can_catch_up: bool = False) -> None:
        """Start the time limit of a round, or of the requests after the rounds.

        The limit is at least ``least`` seconds. ``can_catch_up`` is True if clients that lost their
        state can receive it again in this round.
        """
        self.ends = self.clock.now() + max(self.round_seconds(), least)
        self.lost = {} if can_catch_up else None
        self.catching_up = set()

    def end(self) -> None:
        """End the rounds, and start the time limit of the requests after them."""
        self._over = True
        self.begin()

    def begin_catching_up(self) -> list[int]:
        """Include the clients that lost their state in pushes again, and return them."""
        self.catching_up = set(self.lost or {})
        return sorted(self.catching_up)

    def receiving(self) -> list[Seat]:
        """Return the active clients, except those that lost their state and must catch up first."""
        behind = set(self.lost or {}) - self.catching_up
        return [seat for seat in self.roster.active() if seat.client not in behind]

    def push_parts(
        self,
        server_round: int,
        parts: Iterable[tuple[Fields, Mapping[str, bytes]]],
        clients: Collection[int] | None = None,
    ) -> list[Reply]:
        """Push fields and blobs to clients, one part after the other, and return the answers.

        ``clients`` restricts the clients; None means all that still take part.
        """
        answers: list[Reply] = []
        # One part for all clients, then the next, so that memory holds one part of blobs at a time.
        for part, (fields, blobs) in enumerate(parts):
            seats = [s for s in self.receiving() if clients is None or s.client in clients]
            answers += self.exchange(
                self.request("push", seat.client, server_round, fields, blobs, part)
                for seat in seats
            )
        return answers

    def push_all(
        self,
        server_round: int,
        fields: Fields,
        blob_of: Callable[[str], bytes],
        clients: Collection[int] | None = None,
        omitted: int = 0,
    ) -> None:
        """Push to clients all blobs that the contract of such a push names, part by part.

        Parameters
        ----------
        fields : fields of every part
        blob_of : function that returns a blob by its key
        clients : as in ``push_parts``
        omitted : number of parts at the end that are not pushed
        """
        parts = self.request("push", 0, server_round, fields).contract.pushed
        pushed = parts[: len(parts) - omitted]
        pushes = ((fields, {key: blob_of(key) for key in keys}) for keys in pushed)
        self.push_parts(server_round, pushes, clients)

    def round_seconds(self) -> float:
        """Return the time limit of a round in seconds.

        It is infinite for simulated clients without ``round-seconds``, because they queue for this
        machine.
        """
        settings = self.settings
        if settings.round_seconds:
            return settings.round_seconds
        return (
            math.inf
            if self.shared_workers
            else max(ROUND_SECONDS, ROUND_DEADLINES * self._of_a_message())
        )

    def _of_a_message(self) -> float:
        """Return the seconds that all attempts of a message may take together."""
        return self.settings.deadline_seconds * self.settings.attempts

    def exchange(
        self,
        requests: Iterable[Request],
        follow_up: FollowUp = lambda _: None,
        patience: Patience = lambda _: 0.0,
    ) -> Iterator[Reply]:
        """Send requests, and yield each valid reply as it arrives. Clients that fail are dropped.

        The next part of a reply is requested before the last one is processed, but pulled only
        after it.

        Parameters
        ----------
        requests : one message per client, made by ``request``
        follow_up : function that returns the next request to the same client, or None. It is called
            with the client's first valid reply, then with each request that it returned. At most
            ``REQUESTS_AHEAD`` requests to a client are open at a time.
        patience : function that returns the seconds an answer of a client may take, if more than
            ``deadline-seconds``
        """
        # 1. Send the first request to each client.
        pending = [self._sent(request, patience) for request in requests]
        last: dict[int, Request] = {}
        last_reply = self.clock.now()
        self._next_look = last_reply + LOOK_SECONDS
        # Near the end of the round's time, clients still get the time of one message with its
        # attempts.
        ends = max(self.ends, last_reply + min(self._of_a_message(), self.round_seconds()))
        # 2. Collect replies until each client has answered or is given up.
        while pending:
            # The round's time is up: whoever has not answered is dropped.
            if self.clock.now() >= ends:
                self._end(pending)
                return
            idle = True
            for entry in list(pending):
                # ``pending`` changes while this loop runs.
                reply = self._pulled(entry, pending) if entry in pending else None
                if reply is None:
                    continue
                idle = False
                last_reply = self.clock.now()
                # A worker has become free for the clients that wait for it.
                if self.shared_workers:
                    self._restart_deadlines(pending)
                body = self._accept(entry, reply, pending)
                # The reply's bytes are in ``body`` now; keep only one copy.
                del reply
                if body is not None:
                    pending.remove(entry)
                    # The client prepares its next part while the caller works on this one.
                    self._ask_ahead(body, pending, last, follow_up)
                    yield body
                # Only one part is in memory when the next one is pulled.
                del body
            # 3. Nothing arrived in this pass: look for new nodes, then wait.
            if pending and idle:
                self._wait(pending, last_reply)

    def _pulled(self, entry: _Pending, pending: list[_Pending]) -> Message | None:
        """Return the reply to an open message, or send the message again if it is late."""
        reply = self.pull(entry.message_id) if entry.message_id is not None else None
        if reply is not None:
            return reply
        # Being late is not enough in a simulation: another client may occupy the worker.
        late = self.clock.now() >= entry.deadline and not self._extend_deadlines_while_working(
            pending
        )
        # A message without an id was not sent; its node may have reconnected by now.
        if entry.message_id is None or late:
            self._send_again(entry, pending, _late(entry.seat), late=late)
        return None

    def _wait(self, pending: list[_Pending], last_reply: float) -> None:
        """Show who is waited for, look for new nodes from time to time, and sleep."""
        if not self._extend_deadlines_while_working(pending):
            self.progress.waiting(_waited_for(pending, self.clock.now()))
        if self.clock.now() >= self._next_look:
            if self._seating is not None:
                self._seating.look_for_nodes()
            self._next_look = self.clock.now() + LOOK_SECONDS
        # Replies come close together; after a while without any, it is enough to ask seldom.
        recent = self.clock.now() < last_reply + A_WHILE
        self.clock.sleep(POLL_SECONDS if recent else SELDOM_SECONDS)

    def somebody_works(self) -> bool:
        """Return True if a simulated client is working, and show the clients' progress lines."""
        if not self.shared_workers or self.work is None:
            return False
        for line in self.work.new_lines():
            self.progress.note("at_work", line)
        return self.work.anybody()

    def _extend_deadlines_while_working(self, pending: list[_Pending]) -> bool:
        """Return True if a simulated client is working; then all deadlines start again.

        Other clients may be waiting for the worker of that client, so none of them is late.
        """
        if goes_on := self.somebody_works():
            self._restart_deadlines(pending)
        return goes_on

    def _restart_deadlines(self, pending: list[_Pending]) -> None:
        for entry in pending:
            entry.deadline = self.clock.now() + entry.seconds

    def _ask_ahead(
        self,
        body: Reply,
        pending: list[_Pending],
        last: dict[int, Request],
        follow_up: FollowUp,
    ) -> None:
        """Send a client its next requests.

        The client answers one request after the other, so each deadline counts from the request
        before. ``last`` holds the last follow-up request of each client, because parts may arrive
        in any order.
        """
        # Requests that this client has not answered yet.
        client = body.header.client
        unanswered = [entry for entry in pending if entry.seat.client == client]
        while (
            len(unanswered) < REQUESTS_AHEAD
            and (following := follow_up(last.get(client, body))) is not None
        ):
            # A copy, which does not keep the contract until the end of the round.
            last[client] = replace(following)
            unanswered.append(self._sent(following))
            pending.append(unanswered[-1])
        for place, entry in enumerate(unanswered, start=1):
            # A part that a later one has overtaken may be lost, so its deadline is not extended.
            if entry.request.header.part > body.header.part:
                entry.deadline = self.clock.now() + place * entry.seconds

    def _sent(self, body: Request, patience: Patience = lambda _: 0.0) -> _Pending:
        seat = self.roster.seats[body.header.client]
        seconds = max(patience(seat), self.settings.deadline_seconds)
        message_id = self.send(body, seat.node_id, seconds)
        now = self.clock.now()
        return _Pending(body, seat, message_id, seconds, now + seconds, seat.node_id, now)

    def _send_again(
        self, entry: _Pending, pending: list[_Pending], reason: str, *, late: bool
    ) -> None:
        """Send a request again to the site's present node; drop the client after the last attempt.

        The holder of a seat has ``attempts`` attempts. If the seat moves to another node of the
        site, that node has as many again.
        """
        seat = entry.seat
        header = entry.request.header
        attempts = self.settings.attempts
        # Flower no longer lists the node.
        gone = seat.node_id not in self.grid.get_node_ids()
        # Move the seat only if the entry's own node failed: another entry may have moved it
        # already.
        if entry.node_id == seat.node_id and (gone or (late and header.attempt >= attempts)):
            if self._seating is not None:
                self._seating.reseat(seat)
            # ``reseat`` may have found a connected node.
            gone = seat.node_id not in self.grid.get_node_ids()
        if gone:
            if not late:
                # No attempt is used up, because the node may connect again before the deadline.
                entry.message_id = None
                return
            reason = "its node is not connected"
        # The seat has moved to another node, which has not been asked yet.
        elsewhere = entry.node_id != seat.node_id
        # The new node of a moved seat has its own attempts.
        if header.attempt >= (2 * attempts if elsewhere else attempts):
            attempt_text = f"{header.attempt} of {count(max(header.attempt, attempts), 'attempt')}"
            self._give_up(entry, pending, f"{reason} ({attempt_text})")
            return
        number = header.attempt + 1
        note = {"client": seat.client, "kind": header.kind, "attempt": number, "reason": reason}
        self.progress.note("sent_again", f"sending again to {seat.site}: {reason}", **note)
        # Only the attempt differs, so the client recognises the request and repeats its answer.
        again = replace(entry.request, header=header.model_copy(update={"attempt": number}))
        following = self._sent(again, lambda _: entry.seconds)
        # The wait is counted from the first attempt.
        following.since = entry.since
        # In place, because ``exchange`` goes through a copy of the list.
        pending[pending.index(entry)] = following

    def _accept(self, entry: _Pending, reply: Message, pending: list[_Pending]) -> Reply | None:
        """Check a reply; return None if the client was dropped, asked again, or has to catch up."""
        # Flower's own error, for instance of a crashed worker: try again.
        if not reply.has_content():
            self._send_again(entry, pending, error_of(reply), late=False)
            return None
        try:
            body = self.checked(reply, entry.request)
        except EspalierError as error:
            # A reply that breaks its contract is not asked for again: its sender is at fault.
            self._give_up(entry, pending, f"reply refused: {error}")
            return None
        if body.header.status == "failed" and self._is_to_catch_up(entry, body):
            # The client's other requests are void until it has its state again.
            pending[:] = [other for other in pending if other.seat is not entry.seat]
            return None
        if body.header.status == "failed":
            self._give_up(entry, pending, str(body.fields["reason"]))
            return None
        return body

    def _give_up(self, entry: _Pending, pending: list[_Pending], why: str) -> None:
        """Drop a client, and stop waiting for its replies."""
        # By seat, because all parts of this client are void.
        pending[:] = [other for other in pending if other.seat is not entry.seat]
        self.drop(entry.request.header.kind, entry.seat, why)

    def _end(self, pending: list[_Pending]) -> None:
        """Drop the clients that have not answered by the end of the round."""
        limit = f"(round-seconds = {self.round_seconds():g})"
        while pending:
            self._give_up(
                pending[0], pending, f"no complete answer at the end of the round {limit}"
            )

    def drop(self, kind: Kind, seat: Seat, why: str) -> None:
        """Drop a client: it receives no more requests.

        Its contribution is lost, unless the rounds are over.
        """
        reason = printable(f"{kind}: {why}")
        if self._over:
            # The rounds are over, so its contribution stays in the result.
            seat.leave_out(reason)
        else:
            seat.drop(reason)
        note = {"client": seat.client, "site": seat.site, "reason": reason}
        self.progress.note("dropped", f"dropped      {seat.site}: {reason}", **note)

    def checked(self, reply: Message, request: Request) -> Reply:
        """Return the content of a reply after checking it against its contract.

        It has the tensors that the check decoded. A valid reply is recorded in the ledger with its
        tensors, a refused one with its bytes only. Any exception while reading a reply becomes
        InputError, so that it affects only its sender; but OSError is a fault of the server's disk.
        """
        try:
            body = read(reply.content)
            # The contract follows from the request, never from what the reply says.
            checked = Reply(**vars(body), contract=request.contract)
            check_reply(checked, request, request.contract, keep=True)
        except (OSError, *INTERRUPTS):
            raise
        except BaseException as error:
            # Not only ``Exception``: parsers of hostile bytes may raise anything.
            self.folder.ledger.record_refused(request.header.client, request.header, reply.content)
            expected = isinstance(error, EspalierError)
            raise InputError(
                # The type only: the text of an unexpected error may quote the client's bytes.
                str(error) if expected else f"unexpected {type(error).__name__}"
            ) from None
        self.folder.ledger.record("up", request.header.client, checked, reply.content)
        return checked

    def _is_to_catch_up(self, entry: _Pending, body: MessageBody) -> bool:
        """Return True if a client reported lost state that can be restored, once in a round."""
        seat = entry.seat
        reason = str(body.fields["reason"])
        # A client that loses its state twice in a round would otherwise be served without end.
        if (
            self.lost is None
            or seat.client in self.lost
            or entry.request.header.kind not in ("push", "train", "fetch")
            or not body.fields.get("lost")
        ):
            return False
        # From now on the client receives nothing until it catches up.
        self.lost[seat.client] = reason
        note = {"client": seat.client, "site": seat.site, "reason": reason}
        self.progress.note("lost", f"lost state   {seat.site}: {reason}", **note)
        return True

    def require_quorum(self, number: int, what: str, of: int | None = None) -> None:
        """Raise RunFailed if ``number`` clients are fewer than the quorum.

        The message has the reason of every client that failed. ``what`` is a verb phrase for it,
        and ``of`` the number of clients that were asked, by default ``num-clients``.
        """
        num_asked = self.settings.num_clients if of is None else of
        needed = self.quorum_of(num_asked)
        if number >= needed:
            return
        quorum = f"the quorum is {needed} of {'num-clients =' if of is None else 'the'} {num_asked}"
        raise RunFailed(f"{count(number, 'client')} {what}, {quorum}{self.reasons()}")

    def quorum_of(self, asked: int) -> int:
        """Return the quorum of this number of clients."""
        # Rounding first: a product such as 3.0000000000000004 must not become 4.
        return math.ceil(round(asked * (self.settings.quorum or 1.0), 6))

    def reasons(self) -> str:
        """Return a line for each client that failed, with the reason."""
        reasons = [
            f"{seat.site}: {seat.reason}" for seat in self.roster.seats.values() if seat.reason
        ]
        reasons += [f"{who}: {why}" for who, why in self.roster.refused.items()]
        if (more := len(reasons) - MAX_REASONS) > 0:
            reasons = [*reasons[:MAX_REASONS], f"and {more} more; see summary.json"]
        return "".join(f"\n  {reason}" for reason in reasons)


def error_of(reply: Message) -> str:
    """Return Flower's error, with the node's own text and the remedy if there are such."""
    reason = printable(reply.error.reason or "")
    text = f"Flower reports error {reply.error.code}{f': {reason}' if reason else ''}"
    return f"{text}; the node {load_remedy()}" if could_not_load(reply) else text


def _waited_for(pending: list[_Pending], now: float) -> str:
    """Return the names of some sites, and since when those with approval were asked."""
    first: dict[str, _Pending] = {}
    for entry in pending:
        if entry.seat.site not in first or entry.since < first[entry.seat.site].since:
            first[entry.seat.site] = entry
    # Sites with approval first, since a person may have to be reminded.
    ordered = sorted(first.values(), key=lambda entry: (not entry.seat.approval, entry.seat.site))
    names = []
    for entry in ordered[:NAMED]:
        reminder = (
            f"asked {duration(now - entry.since)} ago; a person there must approve its replies"
        )
        names.append(f"{entry.seat.site} ({reminder})" if entry.seat.approval else entry.seat.site)
    return ", ".join(names) + (f" and {len(ordered) - NAMED} more" if len(ordered) > NAMED else "")


def _late(seat: Seat) -> str:
    text = "no reply before the deadline"
    approval = "a person there must approve its replies (espalier approve); raise deadline-seconds"
    return f"{text}; {approval}" if seat.approval else text
