"""Life of a run, the same for all methods: enrolment, rounds, local baselines and evaluation.

``Method`` has the questions whose answers differ between methods.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

from espalier.amounts import duration
from espalier.identity.code_hash import code_sha256
from espalier.identity.site_keys import public_keys
from espalier.messages.message import MessageBody, NoFields
from espalier.messages.sums.secure_sum import report_of
from strategies.base.enrolment import Enroller
from strategies.base.evaluation import in_words
from strategies.base.inbox import Inbox
from strategies.base.method import ClientOrder, FoldsSums, Method, Selection
from strategies.base.roster import Seat
from strategies.base.rounds import Reply, Request
from strategies.base.run_folder import Times
from strategies.base.sums.exchanges import SecureSum
from strategies.base.sums.masked_sums import MaskedSums

PATIENCE = 4
"""Factor between a client's time in all its rounds and its deadline for the local baseline."""


class Federation:
    """Course of one run with deadlines, a quorum, checkpoints, and messages in parts.

    ``measure`` evaluates the intermediate result for the given clients, and ``enrolled`` is called
    with all seats after enrolment.
    """

    def __init__(
        self,
        method: Method,
        measure: Callable[[Sequence[int]], dict[str, Any]] | None = None,
        enrolled: Callable[[Sequence[Seat]], None] = lambda _: None,
    ) -> None:
        self.method = method
        self.run = method.run
        self.rounds = method.run.rounds
        self.measurements: list[dict[str, Any]] = []
        """Evaluations between rounds, each with its ``round``."""
        self._measure = measure
        self._enrolled = enrolled
        self._prepared = 0
        """Last round whose decisions are in the checkpoint."""
        self._orders: dict[int, ClientOrder] = {}
        """Order of each client of the round."""
        self._reports: dict[int, tuple[dict[str, Any], Sequence[Sequence[str]]]] = {}
        """Report of each client of the round, and the blob keys of each part of its reply."""

    # ----- phases of a run ------------------------------------------------------------------------

    def start(self) -> None:
        """Run the method, from the last checkpoint if there is one.

        Raises RunFailed if too few clients enrolled or finished a round (checkpoints of earlier
        rounds stay), and InputError if the checkpoint is damaged, lost, or of another run.
        """
        run = self.run
        rounds = self.rounds
        # 1. Continue from the checkpoint, or make sure that there is nothing to continue from.
        saved = run.checkpoint.load(run.identity())
        if saved is None:
            run.folder.require_not_begun()
        else:
            run.folder.restore_ledger(saved["state"]["traffic"])
        # 2. Enrol: a resumed run accepts only the sites that have a number in the checkpoint.
        read_keys = partial(public_keys, run.settings.site_keys)
        enroller = Enroller(rounds, code_sha256(), run.model.sha256, run.site_keys, read_keys)
        enroller.enrol(saved["clients"] if saved else None)
        if saved:
            self._resume(saved)
        self._enrolled(rounds.roster.active())
        name = run.settings.method
        run.progress.note("method", f"{name:<12} {self.method.description()}")
        # A resumed run must ask the same clients for the same work, because a client answers a
        # round only once.
        if not saved:
            self._save(0)
        self.carry_out()

    def carry_out(self) -> None:
        """Run the rounds that are left, push the result, and let the clients evaluate it."""
        rounds = self.rounds
        while (server_round := rounds.finished + 1) <= self.method.num_rounds:
            self._round(server_round)
        last = rounds.finished
        rounds.end()
        # The result leaves first: baselines and evaluation refer to it.
        self.method.push_result(last)
        self._make_local_baselines(last)
        rounds.begin()
        evaluation = self.method.evaluation
        evaluation.collect(rounds, rounds.exchange(evaluation.requests(rounds, last)))
        # Only now: until here a resumed run may still have to unmask the last sum.
        if self.run.settings.federation.secure_sum:
            self._end_sums()

    def _save(self, server_round: int) -> None:
        run = self.run
        roster = self.rounds.roster
        common = {
            "clients": roster.state(),
            "traffic": run.folder.ledger.state(),
            "prepared": self._prepared,
            "measurements": self.measurements,
        }
        run.checkpoint.save(
            server_round,
            roster.clients(),
            run.identity(),
            {**self.method.state(), **common},
            self.method.result.stored(),
        )
        run.folder.save_times(Times(run.seconds(), roster.times()))

    # Blobs are stored before the state that names them.
    def _resume(self, saved: dict[str, Any]) -> None:
        self.rounds.finish(saved["round"])
        self._prepared = saved["state"]["prepared"]
        self.measurements = saved["state"]["measurements"]
        self.method.restore(saved["state"])
        self.rounds.roster.restore(saved["state"]["clients"])
        self.rounds.roster.restore_times(self.run.folder.load_times().clients)
        text = f"resumed      after round {saved['round']}"
        if self.run.seconds_before:
            text += f", {duration(self.run.seconds_before)} before it was interrupted"
        self.run.progress.note("resumed", text, round=saved["round"])

    # ----- phases of a round ----------------------------------------------------------------------

    def _round(self, server_round: int) -> None:
        """Run one round and write its checkpoint."""
        # 1. Decide and push what the clients need for the round.
        rounds = self.rounds
        # A resumed run must not decide again: clients may have received the first decision.
        if self._prepared < server_round and self.method.before_round(server_round):
            self._prepared = server_round
            self._save(server_round - 1)
        catch_up = self.method.catch_up(server_round)
        rounds.begin(can_catch_up=catch_up is not None)
        selection = self.method.prepare(server_round, partial(self._save, server_round - 1))
        active = [seat.client for seat in rounds.roster.active()]
        selection = selection or Selection(active)
        rounds.require_quorum(len(active), f"left for round {server_round}")
        # 2. Ask the clients that still take part.
        clients = [client for client in selection.clients if client in active]
        num_rounds = self.method.num_rounds
        self.run.progress.begin(
            self.method.WORDS.title,
            len(clients),
            of_clients=True,
            server_round=(server_round, num_rounds) if num_rounds > 1 else None,
        )

        # A secure sum may ask several times, in sessions of their own.
        def replies(session: str = "") -> Iterator[MessageBody]:
            # Lost clients are asked only after they have caught up.
            present = [client for client in clients if client not in (rounds.lost or {})]
            return chain(
                rounds.exchange(self._requests(server_round, present, session), self._next_part),
                self._caught_up(server_round, catch_up, session),
            )

        # 3. Receive and aggregate.
        if self.run.settings.federation.secure_sum:
            self._aggregate_sums(server_round, replies, selection.quorum_of)
        else:
            self._aggregate(server_round, replies(), selection.quorum_of)
        # 4. The checkpoint is written last, so a crash before it repeats the round.
        self._measure_result(server_round)
        self._save(server_round)
        rounds.finish(server_round)
        self.run.progress.note(
            "checkpoint", f"checkpoint   after round {server_round}", round=server_round
        )

    def _requests(
        self, server_round: int, clients: Iterable[int], session: str
    ) -> Iterator[Request]:
        """Yield the orders of clients that still take part; ``session`` is that of a secure sum."""
        # Clients may have been dropped since the selection.
        active = {seat.client for seat in self.rounds.roster.active()}
        for client in (number for number in clients if number in active):
            order = self.method.order(server_round, client)
            # The message has the blobs, so the order need not keep them in memory.
            self._orders[client] = replace(order, blobs={})
            blobs = {**order.blobs, **order.along}
            yield self.rounds.request(
                "train", client, server_round, order.fields, blobs, session=session
            )

    def _caught_up(
        self,
        server_round: int,
        catch_up: Callable[[Sequence[int]], None] | None,
        session: str,
    ) -> Iterator[Reply]:
        """Push lost state to the clients that need it, then repeat their orders."""
        lost = self.rounds.begin_catching_up()
        if not lost or catch_up is None:
            return
        catch_up(lost)
        yield from self.rounds.exchange(
            self._requests(server_round, lost, session), self._next_part
        )

    def _next_part(self, body: Reply | Request) -> Request | None:
        """Return the request for the next part of a client's reply, by the hashes of its report."""
        header = body.header
        order = self._orders[header.client]
        if isinstance(body, Reply):
            self._reports[header.client] = body.fields, body.contract.parts
        report, parts = self._reports[header.client]
        following = header.part + 1
        # The last part has arrived. A secure sum has no other part: its tensors follow masked.
        if following == len(parts):
            return None
        keys = [key for part in parts for key in part]
        # The client committed to the hashes in its first reply; later parts must match them.
        hashes = dict(zip(keys, report["blob_sha256"], strict=True))
        fields = order.fetch(report, [hashes[key] for key in sorted(parts[following])])
        return self.rounds.request(
            "fetch", header.client, header.server_round, fields, order.along, following
        )

    def _aggregate(
        self, server_round: int, replies: Iterable[MessageBody], quorum_of: int | None
    ) -> None:
        """Receive the replies as they arrive, and aggregate the complete and plausible ones."""
        # Replies go to the disk in order of arrival, and are read in client order.
        inbox = Inbox(self.run.folder.inbox)
        for body in inbox.receive(replies):
            self._note_arrival(body)
        # A client with a missing part or an implausible reply does not count at all.
        clients = [client for client in inbox.complete_clients() if self._is_sound(inbox, client)]
        self.rounds.require_quorum(
            len(clients), f"sent their {self.method.WORDS.sent}", of=quorum_of
        )
        # Only whole replies of the clients in ``clients`` are read.
        self.method.fold(server_round, inbox, clients)
        inbox.clear()

    def _aggregate_sums(
        self,
        server_round: int,
        replies: Callable[[str], Iterator[MessageBody]],
        quorum_of: int | None,
    ) -> None:
        """Let the clients sum their tensors secretly, and aggregate the sum."""
        sums = MaskedSums(self.run.folder.masked_sums)
        secure = SecureSum(self.rounds, sums.blobs(server_round), self.run.site_keys)
        worked = set[int]()

        def advertise(session: str) -> Iterator[MessageBody]:
            for body in replies(session):
                # A new session asks for the same work again, which counts once.
                if body.header.client not in worked:
                    worked.add(body.header.client)
                    self._note_work(body)
                yield body

        # Clients help to unmask only one sum of a round, so a resumed run goes on with that one.
        masked = sums.load(server_round)
        if masked is None:
            masked = secure.masked_sum(server_round, advertise, quorum_of)
            # From here on a resumed run repeats the unmasking only.
            ledger = self.run.folder.ledger
            masked = replace(masked, seats=self.rounds.roster.state(), traffic=ledger.state())
            sums.save(masked)
        else:
            self.rounds.roster.restore(masked.seats)
            self.run.folder.restore_ledger(masked.traffic)
        unmasked = secure.unmask(masked)
        # Reports of clients whose tensors are in the sum; the others' work is lost.
        for client in masked.included:
            seat = self.rounds.roster.seats[client]
            train = self.rounds.request("train", client, server_round, NoFields())
            report = report_of(masked.reports[str(client)])
            self.method.note_part(seat, replace(train, fields=report))
        assert isinstance(self.method, FoldsSums)
        self.method.fold_sums(server_round, unmasked, masked.included)

    def _end_sums(self) -> None:
        """Delete the masked sums, which only an interrupted run needs."""
        MaskedSums(self.run.folder.masked_sums).clear()

    def _note_arrival(self, body: MessageBody) -> None:
        if body.header.kind == "train":
            self._note_work(body)
        seat = self.rounds.roster.seats[body.header.client]
        words = self.method.WORDS
        self.method.note_part(seat, body)
        if body.header.part + 1 == body.header.num_parts:
            sent = self._orders[seat.client].sends or words.sent
            text = f"{seat.site}: {sent}, {seat.work()}"
            self.run.progress.step(words.event, text, client=seat.client, seconds=seat.seconds)

    def _note_work(self, body: MessageBody) -> None:
        # The client reports this time itself.
        self.rounds.roster.seats[body.header.client].worked(body.fields["seconds"])

    def _is_sound(self, inbox: Inbox, client: int) -> bool:
        """Return True if a reply is plausible; drop its client otherwise."""
        fault = self.method.fault_of(inbox, client)
        if fault is not None:
            self.rounds.drop("train", self.rounds.roster.seats[client], f"reply refused: {fault}")
        return fault is None

    def _measure_result(self, server_round: int) -> None:
        """Evaluate the intermediate result if ``evaluation.every`` asks for it after this round."""
        every = self.run.settings.evaluation.every
        if self._measure is not None and every and server_round % every == 0:
            clients = [seat.client for seat in self.rounds.roster.active()]
            self.measurements.append({"round": server_round, **self._measure(clients)})
            text = f"measured     after round {server_round}: {in_words(self.measurements[-1])}"
            self.run.progress.note("measured", text, **self.measurements[-1])

    # ----- local baselines ------------------------------------------------------------------------

    def _make_local_baselines(self, server_round: int) -> None:
        """Let the clients compute their local baselines; the limit grows with the rounds' time."""
        rounds = self.rounds
        orders = {
            seat.client: order
            for seat in rounds.roster.active()
            if (order := self.method.local_baseline_request(seat)) is not None
        }
        if not orders:
            return
        seats = [rounds.roster.seats[client] for client in orders]
        self.run.progress.begin("baseline", len(seats), of_clients=True)
        # The time of all rounds may exceed that of one; slow clients are not cut off.
        rounds.begin(least=max(map(self._patience, seats)) * rounds.settings.attempts)
        requests = [
            rounds.request("local_baseline", client, server_round, order)
            for client, order in orders.items()
        ]
        for body in rounds.exchange(requests, patience=self._patience):
            seat = rounds.roster.seats[body.header.client]
            seconds = body.fields["seconds"]
            seat.worked_after_rounds(seconds)
            text = f"{seat.site}: local baseline, {duration(seconds, tenths=True)} of work"
            self.run.progress.step("local_baseline", text, client=seat.client)

    def _patience(self, seat: Seat) -> float:
        """Return the seconds that a client may take for its local baseline.

        The limit is ``PATIENCE`` times the expected time of all rounds. A client that worked in
        some rounds is expected to be as fast in all of them. A client that worked in none is
        expected to be as fast as the slowest other client. Clients report their own times, so a
        round counts at most as long as the server would have waited.
        """
        max_seconds = self.rounds.settings.deadline_seconds * self.rounds.settings.attempts
        seats = self.rounds.roster.seats.values()
        # A client cannot raise the limit for itself without end by reporting long times.
        round_seconds = {
            other.client: min(other.seconds / other.rounds, max_seconds)
            for other in seats
            if other.rounds
        }
        usual = round_seconds.get(seat.client, max(round_seconds.values(), default=0.0))
        return PATIENCE * usual * self.method.num_rounds
