"""What all methods share: the life of a run from enrolment to evaluation, and of a round from its orders to its result.

A round: the server prepares (``before_round``), and what it decided is in the checkpoint before a message leaves; clients are
brought what they need (``prepare``); they are asked (``order``), and their replies arrive part by part; clients that lost their
state catch up once (``bring_again``); whoever's reply is whole and plausible counts (``fold``); then comes the checkpoint.
"""

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from espalier.amounts import duration
from espalier.modeling.opened import OpenedModel
from espalier.settings.run import RunSettings
from espalier.wire.alone import Alone
from espalier.wire.code_hash import code_sha256
from espalier.wire.messages import Letter, Scalars, read
from espalier.wire.parts import PartRequest
from strategies.engine.enrolment import Enroller
from strategies.engine.evaluation import ClientEvaluation
from strategies.engine.inbox import Inbox
from strategies.engine.result import RunResult
from strategies.engine.roster import Seat
from strategies.engine.rounds import Rounds
from strategies.engine.run import Run
from strategies.engine.run_folder import Times

PATIENCE = 4
"""How many times as long as in its rounds a client may take for the same work alone, before it is asked again."""


class Method(Strategy):
    """A strategy of Flower's whose rounds have deadlines, a quorum and a checkpoint, and whose messages come in parts.

    Parameters
    ----------
    run : settings, base model, computing and run folder
    evaluation : what clients evaluate after the last round; by default nothing
    """

    rounds: Rounds
    result: RunResult
    """What the rounds lead to."""

    SENT = "results"
    """What clients send, in the plural, for people."""
    STEPS = ("replies", "reply")
    """Names of the progress of arriving replies: of all, and of each."""

    def __init__(self, run: Run, evaluation: ClientEvaluation | None = None) -> None:
        self.run = run
        self.evaluation = evaluation or ClientEvaluation(run, {})
        self._prepared = 0
        """The last round that ``before_round`` prepared."""
        self._asked: list[int] = []
        """Clients of the round."""
        self._catching_up: set[int] = set()
        """Those among them that lost what they were brought, and are brought it again."""
        self._reports: dict[int, dict[str, Any]] = {}
        """What each client of the round said when it had done its work."""
        self.look: Callable[[Sequence[int]], dict[str, Any]] | None = None
        """Measures the result as it is between rounds, where it is one per client that of those which still take part."""
        self.enrolled: Callable[[Sequence[Seat]], None] = lambda _: None
        """Hears who takes part, when all have enrolled."""
        self.looks: list[dict[str, Any]] = []
        """What was measured, each with its ``round``."""

    # ----- what a method says -----------------------------------------------------------------------------------------

    @classmethod
    def require_fit(
        cls, settings: RunSettings, model: OpenedModel, capabilities: Mapping[str, float]
    ) -> None:
        """Refuse a run that cannot be done with this model, before anything is started; ``Mistake`` says why.

        ``capabilities`` are those of the clients by name, as far as they are known: all of a simulation, none of a deployment.
        """
        return

    @property
    @abstractmethod
    def num_rounds(self) -> int:
        """Rounds of the run; it may grow while the run goes on, when something is left to do."""

    def before_round(self, server_round: int) -> bool:
        """Decide at the server what a round needs; whether ``state`` holds something now that is not to be decided anew.

        If so there is a checkpoint before a message leaves, and a resumed run does not come here for this round again.
        """
        return False

    def prepare(self, server_round: int) -> Iterable[Iterable[Message]]:
        """Requests that bring the clients what they need for a round, one part of it after the other."""
        return []

    def clients_of(self, server_round: int) -> Sequence[int]:
        """Clients that a round asks, those among them that still take part."""
        return [seat.client for seat in self.rounds.roster.active()]

    @abstractmethod
    def order(self, server_round: int, client: int) -> tuple[Scalars, Mapping[str, bytes]]:
        """What a client is asked to do in a round: scalars and blobs of its ``train``."""

    @abstractmethod
    def reply_parts(self, server_round: int, client: int) -> Sequence[Sequence[str]]:
        """Keys of the blobs of each part in which the client's reply travels."""

    def part_order(self, client: int, hashes: list[str]) -> PartRequest:
        """Scalars of a ``fetch`` of blobs with these hashes."""
        return PartRequest(blob_sha256=hashes)

    def part_blobs(self, server_round: int, client: int) -> Mapping[str, bytes]:
        """Blobs that go along with a ``fetch``, where its shapes do not follow from its scalars."""
        return {}

    def catches_up(self, server_round: int) -> bool:
        """Whether a client that lost its state can be brought what it needs for a round."""
        return False

    def bring_again(self, server_round: int, lost: Sequence[int]) -> Iterable[Iterable[Message]]:
        """Requests that bring clients which lost their state what they need, one part after the other."""
        return []

    def note_report(self, seat: Seat, report: Mapping[str, Any]) -> None:
        """Note on a client's seat what its report says, for the summary."""
        return

    def sent_text(self, seat: Seat) -> str:
        """What has arrived of a client, in words."""
        return f"{self.SENT} of {seat.site}"

    def received(self, server_round: int) -> None:
        """All replies of a round are here, and none was looked at."""
        return

    def is_plausible(self, inbox: Inbox, client: int) -> bool:
        """Whether what a client sent can have come of honest work; if not, it is dropped here."""
        return True

    def quorum_of(self) -> int | None:
        """Of how many clients the quorum is a share; None: of all of the run."""
        return None

    @abstractmethod
    def fold(self, server_round: int, inbox: Inbox, clients: list[int]) -> None:
        """Make of what these clients sent what the round leads to, in order of client."""

    def deliver(self, server_round: int) -> Iterable[Iterable[Message]]:
        """Requests that bring the result to the clients, one part of it after the other; none if they do not need it."""
        return []

    @abstractmethod
    def summary(self) -> None:
        """Show what will be done."""

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds, JSON values only."""
        return self.result.state()

    def restore(self, state: dict[str, Any]) -> None:
        """Take over what ``state`` returned."""
        self.result.restore(state)

    def stored(self) -> Collection[str]:
        """Hashes of all blobs that ``state`` names."""
        return self.result.stored()

    # ----- the life of a run ------------------------------------------------------------------------------------------

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

        Of Flower's arguments only ``grid`` is used, the others are part of the run's settings.

        Raises
        ------
        RunFailed
            Too few clients enrolled, or finished a round; checkpoints of earlier rounds stay.
        Mistake
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
        Enroller(self.rounds, code_sha256(), run.model.sha256, run.site_keys).enrol(
            saved["clients"] if saved else None
        )
        if saved:
            self._resume(saved)
        self.enrolled(self.rounds.roster.active())
        self.summary()
        if not saved:  # a resumption asks the same of the same clients, who answer a round once
            self._save(0)
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
        """One round, and its checkpoint."""
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
        """Measure what the rounds have led to, where that is wanted after this one."""
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
        """The round is in the checkpoint, so that it does not come again: what is to be written of it once can be.

        A resumption calls it for all finished rounds anew: the server may have been killed between the two.
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
        """Bring clients something; what they answer is the method's business."""
        for requests in parts:
            for reply in self.rounds.exchange(requests):
                self.note_delivered(read(reply.content))

    def bring(
        self,
        server_round: int,
        parts: Iterable[tuple[Scalars, Mapping[str, bytes]]],
        clients: Collection[int] | None = None,
    ) -> Iterator[list[Message]]:
        """Requests that bring scalars and blobs to clients that still take part, one part after the other; None: to all."""
        for part, (scalars, blobs) in enumerate(parts):
            seats = [seat for seat in self.receiving() if clients is None or seat.client in clients]
            yield [
                self.rounds.request("deliver", seat, server_round, scalars, dict(blobs), part)
                for seat in seats
            ]

    def receiving(self) -> list[Seat]:
        """Clients that still take part, without those that lost what they were brought and do not catch up yet."""
        behind = set(self.rounds.lost or ()) - self._catching_up
        return [seat for seat in self.rounds.roster.active() if seat.client not in behind]

    def note_delivered(self, letter: Letter) -> None:
        """Take note of the answer to a ``deliver``, where the method's contract lets it say something."""
        return

    # ----- a round ----------------------------------------------------------------------------------------------------

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The round's orders, to those of its clients that still take part."""
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
        """Receive the replies as they come, and fold those that are whole and plausible."""
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
        """Bring clients that lost their state what they need, and ask again."""
        lost = sorted(self.rounds.lost or {})
        if not lost:
            return
        self._catching_up = set(lost)
        self._exchange_all(self.bring_again(server_round, lost))
        active = {seat.client for seat in self.rounds.roster.active()}
        again = self._orders(server_round, [client for client in lost if client in active])
        yield from self.rounds.exchange(again, self.next_part)

    def next_part(self, letter: Letter) -> Message | None:
        """Ask for the part of a client's reply that follows the one which has arrived, by the hashes of its report."""
        header = letter.header
        if header.kind == "train":
            self._reports[header.client] = letter.scalars
        cut = self.reply_parts(header.server_round, header.client)
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

    # ----- what clients make alone ------------------------------------------------------------------------------------

    def alone_order(self, seat: Seat) -> Alone | None:
        """What a client is to make by itself; None: nothing."""
        return Alone()

    @property
    def lets_work_alone(self) -> bool:
        """Whether clients make something by themselves: what is evaluated, and the rounds do not leave."""
        return self.evaluation.asked and self.run.settings.job.makes_alone

    def _let_work_alone(self, server_round: int) -> None:
        """Let clients make what the rounds do not leave; it may take as long as they."""
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
                f"{seat.site} by itself, {duration(seconds, tenths=True)} of work",
                client=seat.client,
            )

    def _patience(self, seat: Seat) -> float:
        """Seconds that a client may take to do alone what it did in its rounds: a multiple of what those were measured to take.

        One that worked in some of the rounds only is expected to be as fast in all of them; one that worked in none, as fast as
        the slowest of the others. Clients measure themselves: none is believed that a round took longer than it was waited for.
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

    # ----- evaluation by the clients ----------------------------------------------------------------------------------

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask every client how well its own result predicts public text, which is sent along, and models its own text."""
        return self.evaluation.requests(self.rounds, server_round)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord:
        """Take note of what clients found, in ``evaluation.figures``."""
        self.evaluation.collect(self.rounds, replies)
        return MetricRecord({"num-clients": len(self.evaluation.figures.clients())})
