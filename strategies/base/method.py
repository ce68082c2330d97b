"""Base class of all methods: phases of a run from enrolment to evaluation, and of a round.

A round has these steps. The server prepares it (``before_round``); its decisions are in the
checkpoint before a message is sent. Clients receive what they need (``prepare``) and their orders
(``order``); replies arrive part by part. Clients that lost their state catch up once
(``bring_again``). Complete and plausible replies are aggregated (``fold``). The checkpoint ends the
round.
"""

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from espalier.amounts import duration
from espalier.hf.opening.opened import OpenedModel
from espalier.identity.code_hash import code_sha256
from espalier.identity.site_keys import public_keys
from espalier.messages.contracts import contract_for
from espalier.messages.local_baseline import Alone
from espalier.messages.message import Letter, NoScalars, Scalars, read
from espalier.messages.parts import PartRequest
from espalier.settings.methods import METHODS
from espalier.settings.run import RunSettings
from strategies.base.enrolment import Enroller
from strategies.base.evaluation import ClientEvaluation
from strategies.base.inbox import Inbox
from strategies.base.result import RunResult
from strategies.base.roster import Seat
from strategies.base.rounds import Rounds
from strategies.base.run import Run
from strategies.base.run_folder import Times

PATIENCE = 4
"""Factor between a client's time in all its rounds and its deadline for the local baseline."""


class Method(Strategy):
    """Flower strategy with deadlines, a quorum, checkpoints, and messages in parts.

    Parameters
    ----------
    run : settings, base model, device and run folder
    evaluation : evaluation by the clients after the last round; by default none
    """

    rounds: Rounds
    result: RunResult
    """Result of the rounds."""

    SENT = "results"
    """Plural noun for what clients send, for messages to people."""
    STEPS = ("replies", "reply")
    """Names of the progress of arriving replies: of all, and of one."""

    def __init__(self, run: Run, evaluation: ClientEvaluation | None = None) -> None:
        self.run = run
        self.evaluation = evaluation or ClientEvaluation(run, {})
        self._prepared = 0
        """Last round that ``before_round`` prepared."""
        self._asked: list[int] = []
        """Clients that the present round asks."""
        self._catching_up: set[int] = set()
        """Clients of the round that lost their state and are receiving it again."""
        self._reports: dict[int, dict[str, Any]] = {}
        """Report of each client of the round, from its first reply part."""
        self._parts_of: dict[int, Sequence[Sequence[str]]] = {}
        """Blob keys of each part of the same reply."""
        self.look: Callable[[Sequence[int]], dict[str, Any]] | None = None
        """Function that evaluates the intermediate result for the given clients, or None.

        Methods with one model per client use it.
        """
        self.enrolled: Callable[[Sequence[Seat]], None] = lambda _: None
        """Function that is called with all seats after enrolment."""
        self.looks: list[dict[str, Any]] = []
        """Evaluations between rounds, each with its ``round``."""

    # ----- hooks that a method implements ---------------------------------------------------------

    @classmethod
    def require_fit(
        cls, settings: RunSettings, model: OpenedModel, capabilities: Mapping[str, float]
    ) -> None:
        """Refuse a run that is impossible with this model, before anything is started.

        Parameters
        ----------
        settings : settings of the run
        model : opened base model
        capabilities : known capabilities by client name: all in a simulation, none in a deployment

        Raises
        ------
        InputError
            The run is impossible; the message says why.
        """
        return

    @property
    def num_rounds(self) -> int:
        """Number of rounds of the run; it may grow during the run if work is left.

        By default it is the number that the settings define.
        """
        return self.run.settings.job.num_rounds(self.run.settings.federation)

    def before_round(self, server_round: int) -> bool:
        """Prepare a round at the server.

        Returns
        -------
        bool
            True if a checkpoint must be written before messages are sent. After it, a resumed run
            does not call this function for the round again.
        """
        return False

    def prepare(self, server_round: int) -> Iterable[Iterable[Message]]:
        """Return requests that push to the clients what they need for a round, part by part."""
        return []

    def clients_of(self, server_round: int) -> Sequence[int]:
        """Return the clients that a round asks, among those that still take part."""
        return [seat.client for seat in self.rounds.roster.active()]

    def order(self, server_round: int, client: int) -> tuple[Scalars, Mapping[str, bytes]]:
        """Return the order of a client in a round: fields and blobs of its ``train`` message."""
        return NoScalars(), {}

    def reply_parts(self, server_round: int, client: int) -> Sequence[Sequence[str]]:
        """Return the blob keys of each part in which the client's reply is sent.

        By default they are those of the contract of an order without content.
        """
        run = self.run
        seat = self.rounds.roster.seats[client]
        order = read(self.rounds.request("train", seat, server_round, NoScalars()).content)
        return contract_for(order, lambda: run.model.plan, run.settings).parts

    def part_order(self, client: int, hashes: list[str]) -> PartRequest:
        """Return the fields of a ``fetch`` of the blobs with these hashes."""
        return PartRequest(blob_sha256=hashes)

    def part_blobs(self, server_round: int, client: int) -> Mapping[str, bytes]:
        """Return blobs to send with a ``fetch`` whose fields do not determine the shapes."""
        return {}

    def catches_up(self, server_round: int) -> bool:
        """Return True if clients that lost their state can receive it again in this round."""
        return False

    def bring_again(self, server_round: int, lost: Sequence[int]) -> Iterable[Iterable[Message]]:
        """Return requests that push the needed state to clients that lost theirs, part by part."""
        return []

    def note_report(self, seat: Seat, report: Mapping[str, Any]) -> None:
        """Record parts of a client's report on its seat, for the summary."""
        return

    def sent_text(self, seat: Seat) -> str:
        """Return a phrase for a client's complete reply."""
        return f"{self.SENT} of {seat.site}"

    def received(self, server_round: int) -> None:
        """Record what the checks need; all replies of the round have arrived, none was read."""
        return

    def is_plausible(self, inbox: Inbox, client: int) -> bool:
        """Return whether a client's reply is plausible.

        An implementation drops the client if it is not.
        """
        return True

    def quorum_of(self) -> int | None:
        """Return the number of clients that the quorum refers to; None: all clients of the run."""
        return None

    @abstractmethod
    def fold(self, server_round: int, inbox: Inbox, clients: list[int]) -> None:
        """Aggregate the replies of these clients, in client order."""

    def deliver(self, server_round: int) -> Iterable[Iterable[Message]]:
        """Return requests that push the result to the clients, part by part, if they need it."""
        return []

    def summary(self) -> None:
        """Show the method and its main settings, by default its title."""
        method = self.run.settings.method
        self.run.progress.note("method", f"{method:<12} {METHODS[method].title}")

    def state(self) -> dict[str, Any]:
        """Return the state for the checkpoint; it holds JSON values only."""
        return self.result.state()

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the state that ``state`` returned."""
        self.result.restore(state)

    def stored(self) -> Collection[str]:
        """Return the hashes of all blobs that ``state`` names."""
        return self.result.stored()

    # ----- phases of a run ------------------------------------------------------------------------

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord | None = None,
        num_rounds: int = 1,
        timeout: float = 0.0,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Run on a grid, from the last checkpoint if there is one.

        Of Flower's arguments only ``grid`` is used; the run's settings replace the others.

        Raises
        ------
        RunFailed
            Too few clients enrolled or finished a round. Checkpoints of earlier rounds stay.
        InputError
            The checkpoint is damaged, lost, or of another run.
        """
        run = self.run
        saved = run.checkpoint.load(run.identity())
        if saved is None:
            run.folder.require_not_begun()
        else:
            run.folder.restore_ledger(saved["state"]["traffic"])
        self.rounds = Rounds(
            grid, run.settings, run.model.plan, run.lineage, run.folder, run.progress, run.clock
        )
        self.rounds.shared_workers = run.simulation
        self.rounds.work = run.work()
        read_keys = partial(public_keys, run.settings.site_keys)
        enroller = Enroller(self.rounds, code_sha256(), run.model.sha256, run.site_keys, read_keys)
        enroller.enrol(saved["clients"] if saved else None)
        if saved:
            self._resume(saved)
        self.enrolled(self.rounds.roster.active())
        self.summary()
        # A resumed run must ask the same clients for the same work, because a client answers a
        # round only once.
        if not saved:
            self._save(0)
        return self.carry_out(grid)

    def carry_out(self, grid: Grid) -> Result:
        """Run the rounds that are left, push the result, and let the clients evaluate it."""
        result = Result()
        while (server_round := self.rounds.finished + 1) <= self.num_rounds:
            if (metrics := self._round(server_round, grid)) is not None:
                result.train_metrics_clientapp[server_round] = metrics

        last, self.rounds.evaluating, self.rounds.lost = self.rounds.finished, True, None
        self.rounds.begin()
        self._exchange_all(self.deliver(last))
        self._let_work_alone(last)
        self.rounds.begin()
        replies = self.rounds.exchange(
            self.configure_evaluate(last, ArrayRecord(), ConfigRecord(), grid)
        )
        metrics = self.aggregate_evaluate(last, replies)
        if metrics is not None:
            result.evaluate_metrics_clientapp[last] = metrics
        return result

    def _round(self, server_round: int, grid: Grid) -> MetricRecord | None:
        """Run one round and write its checkpoint."""
        if self._prepared < server_round and self.before_round(server_round):
            self._prepared = server_round
            self._save(server_round - 1)
        self.rounds.begin()
        self.rounds.lost, self._catching_up = {} if self.catches_up(server_round) else None, set()
        self._exchange_all(self.prepare(server_round))
        self.rounds.require_quorum(
            len(self.rounds.roster.active()), f"left for round {server_round}"
        )
        replies = self.rounds.exchange(
            self.configure_train(server_round, ArrayRecord(), ConfigRecord(), grid), self.next_part
        )
        _, metrics = self.aggregate_train(server_round, replies)
        self._look(server_round)
        self._save(server_round)
        self.note_saved(server_round)
        self.rounds.finished = server_round
        self.run.progress.note(
            "checkpoint", f"checkpoint   after round {server_round}", round=server_round
        )
        return metrics

    def _look(self, server_round: int) -> None:
        """Evaluate the intermediate result if ``evaluation.every`` asks for it after this round."""
        every = self.run.settings.evaluation.every
        if self.look is not None and every and server_round % every == 0:
            clients = [seat.client for seat in self.rounds.roster.active()]
            self.looks.append({"round": server_round, **self.look(clients)})
            self.run.progress.note(
                "looked", f"measured     after round {server_round}", **self.looks[-1]
            )

    def _save(self, server_round: int) -> None:
        run = self.run
        roster = self.rounds.roster
        common = {
            "clients": roster.state(),
            "traffic": run.folder.ledger.state(),
            "prepared": self._prepared,
            "looks": self.looks,
        }
        run.checkpoint.save(
            server_round,
            roster.clients(),
            run.identity(),
            {**self.state(), **common},
            self.stored(),
        )
        run.folder.save_times(Times(run.seconds(), roster.times()))

    def note_saved(self, server_round: int) -> None:
        """Write output that belongs to a round once; its checkpoint is complete.

        A resumption calls it again for all finished rounds, because the server may have been killed
        between the checkpoint and this call.
        """
        return

    def _resume(self, saved: dict[str, Any]) -> None:
        self.rounds.finished = saved["round"]
        self._prepared = saved["state"]["prepared"]
        self.looks = saved["state"]["looks"]
        self.restore(saved["state"])
        self.rounds.roster.restore(saved["state"]["clients"])
        self.rounds.roster.restore_times(self.run.folder.load_times().clients)
        for finished in range(1, saved["round"] + 1):
            self.note_saved(finished)
        before = (
            f", {duration(self.run.seconds_before)} before it was interrupted"
            if self.run.seconds_before
            else ""
        )
        self.run.progress.note(
            "resumed", f"resumed      after round {saved['round']}{before}", round=saved["round"]
        )

    def _exchange_all(self, parts: Iterable[Iterable[Message]]) -> None:
        """Push the parts to the clients, and pass each answer to ``note_delivered``."""
        for requests in parts:
            for reply in self.rounds.exchange(requests):
                self.note_delivered(read(reply.content))

    def bring(
        self,
        server_round: int,
        parts: Iterable[tuple[Scalars, Mapping[str, bytes]]],
        clients: Collection[int] | None = None,
    ) -> Iterator[list[Message]]:
        """Return requests that push fields and blobs to active clients, part by part.

        ``clients`` restricts them; None means all.
        """
        for part, (scalars, blobs) in enumerate(parts):
            seats = [seat for seat in self.receiving() if clients is None or seat.client in clients]
            yield [
                self.rounds.request("deliver", seat, server_round, scalars, dict(blobs), part)
                for seat in seats
            ]

    def receiving(self) -> list[Seat]:
        """Return the active clients, except those that lost their state and must catch up first."""
        behind = set(self.rounds.lost or ()) - self._catching_up
        return [seat for seat in self.rounds.roster.active() if seat.client not in behind]

    def note_delivered(self, letter: Letter) -> None:
        """Process the answer to a ``deliver``; only some methods' contracts allow fields in it."""
        return

    # ----- phases of a round ----------------------------------------------------------------------

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return the round's orders for those of its clients that still take part."""
        active = {seat.client for seat in self.rounds.roster.active()}
        self._asked = [client for client in self.clients_of(server_round) if client in active]
        return self._orders(
            server_round,
            [client for client in self._asked if client not in (self.rounds.lost or {})],
        )

    def _orders(self, server_round: int, clients: Iterable[int]) -> list[Message]:
        orders = (
            (self.rounds.roster.seats[client], *self.order(server_round, client))
            for client in clients
        )
        return [
            self.rounds.request("train", seat, server_round, scalars, dict(blobs))
            for seat, scalars, blobs in orders
        ]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[None, MetricRecord]:
        """Receive the replies as they arrive, and aggregate the complete and plausible ones."""
        self.run.progress.begin(self.STEPS[0], len(self._asked))
        inbox = Inbox(self.run.folder.inbox)
        for letter in inbox.receive(chain(replies, self._caught_up(server_round))):
            self._note_arrival(letter)
        self.received(server_round)
        clients = [
            client for client in inbox.complete_clients() if self.is_plausible(inbox, client)
        ]
        self.rounds.require_quorum(len(clients), f"sent their {self.SENT}", of=self.quorum_of())
        self.fold(server_round, inbox, clients)
        inbox.clear()
        return None, MetricRecord({"num-clients": len(clients)})

    def _caught_up(self, server_round: int) -> Iterator[Message]:
        """Push lost state to the clients that need it, then repeat their orders."""
        lost = sorted(self.rounds.lost or {})
        if not lost:
            return
        self._catching_up = set(lost)
        self._exchange_all(self.bring_again(server_round, lost))
        active = {seat.client for seat in self.rounds.roster.active()}
        again = self._orders(server_round, [client for client in lost if client in active])
        yield from self.rounds.exchange(again, self.next_part)

    def next_part(self, letter: Letter) -> Message | None:
        """Return the request for the next part of a client's reply, by the hashes of its report."""
        header = letter.header
        if header.kind == "train":
            self._reports[header.client] = letter.scalars
            self._parts_of[header.client] = self.reply_parts(header.server_round, header.client)
        cut = self._parts_of[header.client]
        following = header.part + 1
        if following == len(cut):
            return None
        keys = [key for part in cut for key in part]
        hashes = dict(zip(keys, self._reports[header.client]["blob_sha256"], strict=True))
        asked = self.part_order(header.client, [hashes[key] for key in sorted(cut[following])])
        seat = self.rounds.roster.seats[header.client]
        along = dict(self.part_blobs(header.server_round, header.client))
        return self.rounds.request("fetch", seat, header.server_round, asked, along, following)

    def _note_arrival(self, letter: Letter) -> None:
        seat = self.rounds.roster.seats[letter.header.client]
        if letter.header.kind == "train":
            seat.worked(letter.scalars["seconds"])
            self.note_report(seat, letter.scalars)
        if letter.header.part + 1 == letter.header.num_parts:
            text = f"{self.sent_text(seat)}, {seat.work()}"
            self.run.progress.step(self.STEPS[1], text, client=seat.client, seconds=seat.seconds)

    # ----- local baselines ------------------------------------------------------------------------

    def alone_order(self, seat: Seat) -> Alone | None:
        """Return the order for a client's local baseline; None if it makes none."""
        return Alone()

    @property
    def lets_work_alone(self) -> bool:
        """True if clients compute a local baseline.

        They do if it is evaluated and the rounds do not yield it.
        """
        return self.evaluation.asked and self.run.settings.job.makes_alone

    def _let_work_alone(self, server_round: int) -> None:
        """Let the clients compute their local baselines.

        The time limit grows with the time that the rounds took.
        """
        if not self.lets_work_alone:
            return
        orders = [
            (seat, order)
            for seat in self.rounds.roster.active()
            if (order := self.alone_order(seat)) is not None
        ]
        self.run.progress.begin("alone", len(orders))
        self.rounds.begin(
            least=max((self._patience(seat) for seat, _ in orders), default=0.0)
            * self.rounds.settings.attempts
        )
        requests = [
            self.rounds.request("alone", seat, server_round, order) for seat, order in orders
        ]
        for reply in self.rounds.exchange(requests, patience=self._patience):
            letter = read(reply.content)
            seat = self.rounds.roster.seats[letter.header.client]
            seconds = letter.scalars["seconds"]
            seat.seconds += seconds
            self.run.progress.step(
                "alone",
                f"local baseline of {seat.site}, {duration(seconds, tenths=True)} of work",
                client=seat.client,
            )

    def _patience(self, seat: Seat) -> float:
        """Return the seconds that a client may take for its local baseline.

        The limit is ``PATIENCE`` times the expected time of all rounds. A client that worked in
        some rounds is expected to be as fast in all of them. A client that worked in none is
        expected to be as fast as the slowest other client. Clients report their own times, so a
        round counts at most as long as the server would have waited.
        """
        most = self.rounds.settings.deadline_seconds * self.rounds.settings.attempts
        seats = self.rounds.roster.seats.values()
        of_a_round = {
            one.client: min(one.seconds / one.rounds, most) for one in seats if one.rounds
        }
        expected = (
            of_a_round.get(seat.client, max(of_a_round.values(), default=0.0)) * self.num_rounds
        )
        return PATIENCE * expected

    # ----- evaluation by the clients --------------------------------------------------------------

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return the evaluation requests to the clients.

        Each client evaluates its own result on evaluation texts that are sent along, and models on
        its own text.
        """
        return self.evaluation.requests(self.rounds, server_round)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord:
        """Record the clients' results in ``evaluation.figures``."""
        self.evaluation.collect(self.rounds, replies)
        return MetricRecord({"num-clients": len(self.evaluation.figures.clients())})
