"""What all methods share: the life of a run from enrolment to evaluation, with a checkpoint after each round."""

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from espalier.wire.alone import Alone, makes_alone
from espalier.wire.code_hash import code_sha256
from espalier.wire.messages import Letter, read
from strategies.engine.enrolment import Enroller
from strategies.engine.evaluation import ClientEvaluation
from strategies.engine.roster import Seat
from strategies.engine.rounds import Rounds
from strategies.engine.run import Run

PATIENCE = 4
"""How many times as long as in its rounds a client may take for the same work alone, before it is asked again."""


class Method(Strategy):
    """A strategy of Flower's whose rounds have deadlines, a quorum and a checkpoint, and whose messages come in parts.

    Parameters
    ----------
    run : settings, base model and run folder
    evaluation : what clients evaluate after the last round
    """

    rounds: Rounds

    def __init__(self, run: Run, evaluation: ClientEvaluation) -> None:
        self.run = run
        self.evaluation = evaluation

    # ----- what a method says -----------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def num_rounds(self) -> int:
        """Rounds of the run; it may grow while the run goes on, when something is left to do."""

    @abstractmethod
    def prepare(self, server_round: int) -> Iterable[Iterable[Message]]:
        """Requests that bring the clients what they need for a round, one part of it after the other."""

    @abstractmethod
    def deliver(self, server_round: int) -> Iterator[Iterable[Message]]:
        """Requests that bring the result to the clients, one part of it after the other; none if they do not need it."""

    @abstractmethod
    def next_part(self, letter: Letter) -> Message | None:
        """Ask for the next part of a reply."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """What a checkpoint holds, JSON values only."""

    @abstractmethod
    def restore(self, state: dict[str, Any]) -> None:
        """Take over what ``state`` returned."""

    @abstractmethod
    def stored(self) -> Collection[str]:
        """Hashes of all blobs that ``state`` names."""

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
        self.rounds = Rounds(grid, run.settings, run.model.plan, run.lineage, run.folder, run.progress, run.clock)
        self.rounds.shared_workers = run.simulation
        self.rounds.work = run.work()
        Enroller(self.rounds, code_sha256(), run.model.sha256).enrol(saved["clients"] if saved else None)
        if saved:
            self._resume(saved)
        self.summary()
        if not saved:  # a resumption asks the same of the same clients, who answer a round once
            self._save(0)
        result, nothing, config = Result(), ArrayRecord(), ConfigRecord()
        while (server_round := self.rounds.finished + 1) <= self.num_rounds:
            self._exchange_all(self.prepare(server_round))
            self.rounds.require_quorum(len(self.rounds.roster.active()), f"are left for round {server_round}")
            replies = self.rounds.exchange(self.configure_train(server_round, nothing, config, grid), self.next_part)
            _, metrics = self.aggregate_train(server_round, replies)
            if metrics is not None:
                result.train_metrics_clientapp[server_round] = metrics
            self._save(server_round)
            self.rounds.finished = server_round
            run.progress.note("checkpoint", f"checkpoint   after round {server_round}", round=server_round)

        last, self.rounds.evaluating = self.rounds.finished, True
        self._exchange_all(self.deliver(last))
        self._let_work_alone(last)
        replies = self.rounds.exchange(self.configure_evaluate(last, nothing, config, grid))
        metrics = self.aggregate_evaluate(last, replies)
        if metrics is not None:
            result.evaluate_metrics_clientapp[last] = metrics
        return result

    def _save(self, server_round: int) -> None:
        run, roster = self.run, self.rounds.roster
        common = {"clients": roster.state(), "traffic": run.folder.ledger.state()}
        run.checkpoint.save(server_round, roster.clients(), run.identity(), {**self.state(), **common}, self.stored())
        run.folder.save_times(roster.times())

    def _resume(self, saved: dict[str, Any]) -> None:
        self.rounds.finished = saved["round"]
        self.restore(saved["state"])
        self.rounds.roster.restore(saved["state"]["clients"])
        self.rounds.roster.restore_times(self.run.folder.load_times())
        self.run.folder.ledger.restore(saved["state"]["traffic"])
        self.run.progress.note("resumed", f"resumed      after round {saved['round']}", round=saved["round"])

    def _exchange_all(self, parts: Iterable[Iterable[Message]]) -> None:
        """Exchange messages whose replies say no more than that they arrived."""
        for requests in parts:
            for _ in self.rounds.exchange(requests):
                pass

    # ----- what clients make alone ------------------------------------------------------------------------------------

    def rank_alone(self, seat: Seat) -> int:
        """Rank of the adapters that a client trains alone which no round has asked; 0: as the settings say."""
        return 0

    def _let_work_alone(self, server_round: int) -> None:
        """Where the rounds leave no local-only result, let clients make it before it is evaluated: it takes as long as they."""
        if not (self.evaluation.asked and makes_alone(self.run.settings)):
            return
        seats = self.rounds.roster.active()
        self.run.progress.begin("alone", len(seats))
        requests = [self.rounds.request("alone", seat, server_round, Alone(rank_limit=self.rank_alone(seat))) for seat in seats]
        for reply in self.rounds.exchange(requests, patience=self._patience):
            letter = read(reply.content)
            seat, seconds = self.rounds.roster.seats[letter.header.client], letter.scalars["seconds"]
            seat.seconds += seconds
            self.run.progress.step("alone", f"{seat.site} by itself, {seconds:.1f} s of work", client=seat.client)

    def _patience(self, seat: Seat) -> float:
        """Seconds that a client may take to do alone what it did in its rounds: a multiple of what those were measured to take.

        One that worked in some of the rounds only is expected to be as fast in all of them; one that worked in none, as fast as
        the slowest of the others. Clients measure themselves: none is believed that a round took longer than it was waited for.
        """
        most = self.rounds.settings.deadline_seconds * self.rounds.settings.attempts
        seats = self.rounds.roster.seats.values()
        of_a_round = {one.client: min(one.seconds / one.rounds, most) for one in seats if one.rounds}
        expected = of_a_round.get(seat.client, max(of_a_round.values(), default=0.0)) * self.num_rounds
        return PATIENCE * expected

    # ----- evaluation by the clients ----------------------------------------------------------------------------------

    def configure_evaluate(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Iterable[Message]:
        """Ask every client how well its own result predicts public text, which is sent along, and models its own text."""
        return self.evaluation.requests(self.rounds, server_round)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord:
        """Losses of each client's own result per public text, and of ``OWN_TEXT_MODELS`` on its own text."""
        return self.evaluation.collect(self.rounds, replies)
