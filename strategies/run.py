"""One run as every strategy sees it, and its life: enrol or resume, rounds with a checkpoint after each, evaluation."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from espalier.modeling.opened import OpenedModel
from espalier.settings.run import RunSettings
from espalier.wire.code_hash import code_sha256
from espalier.wire.ledger import dense_bytes_of
from espalier.wire.messages import Letter
from strategies.checkpoint import CheckpointFolder
from strategies.clock import Clock
from strategies.enrolment import Enroller
from strategies.progress import Progress
from strategies.rounds import Rounds
from strategies.run_folder import RunFolder


@dataclass
class Run:
    """What a strategy is given: settings, the dense model, and a place to write."""

    settings: RunSettings
    model: OpenedModel
    folder: RunFolder
    lineage: str
    """Names the run to its clients, also after it was resumed: letters, digits and hyphens."""
    clock: Clock = field(default_factory=Clock)
    simulation: bool = False
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    """Where votes are counted."""
    progress: Progress = field(init=False)
    checkpoint: CheckpointFolder = field(init=False)

    def __post_init__(self) -> None:
        self.progress = Progress(self.folder, self.clock)
        self.checkpoint = CheckpointFolder(self.folder.checkpoint)
        self.folder.ledger.dense_bytes = dense_bytes_of(self.model.plan)

    def identity(self) -> dict[str, str]:
        """What a resumed run must share with the run that it continues."""
        return {"settings": self.settings.digest(), "model": self.model.sha256}


class Method(Protocol):
    """What the life of a run asks of a strategy, beside Flower's own methods."""

    run: Run
    rounds: Rounds

    @property
    def num_rounds(self) -> int:
        """Rounds of the run; it may grow while the run goes on, when something is left to do."""

    def prepare(self, server_round: int) -> Iterable[Iterable[Message]]:
        """Requests that bring the clients what they need for a round, one part of it after the other."""

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Iterable[Message]:
        """Requests of a round."""

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Fold the replies of a round."""

    def deliver(self, server_round: int) -> Iterator[Iterable[Message]]:
        """Requests that bring the result to the clients, one part of it after the other; none if they do not need it."""

    def configure_evaluate(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Iterable[Message]:
        """Requests of the evaluation by clients."""

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Fold the replies of an evaluation."""

    def next_part(self, letter: Letter) -> Message | None:
        """Ask for the next part of a reply."""

    def summary(self) -> None:
        """Show the settings."""

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds, JSON values only."""

    def restore(self, state: dict[str, Any]) -> None:
        """Take over what ``state`` returned."""


def live(method: Method, grid: Grid) -> Result:
    """Run a strategy on a grid, from its last checkpoint if there is one.

    Raises
    ------
    RunFailed
        Too few clients enrolled, or finished a round; checkpoints of earlier rounds stay.
    Mistake
        The checkpoint is of another run.
    """
    run = method.run
    saved = run.checkpoint.load(run.identity())
    method.rounds = Rounds(grid, run.settings, run.model.plan, run.lineage, run.folder, run.progress, run.clock)
    method.rounds.shared_workers = run.simulation
    Enroller(method.rounds, code_sha256(), run.model.sha256).enrol(saved["ranks"] if saved else None)
    method.summary()
    if saved:
        method.rounds.finished = saved["round"]
        method.restore(saved["state"])
        method.rounds.roster.restore(saved["state"]["clients"])
        run.folder.ledger.restore(saved["state"]["traffic"])
        run.progress.note("resumed", f"resumed      after round {saved['round']}", round=saved["round"])

    result, nothing, config = Result(), ArrayRecord(), ConfigRecord()
    while (server_round := method.rounds.finished + 1) <= method.num_rounds:
        _exchange_all(method, method.prepare(server_round))
        method.rounds.require_quorum(len(method.rounds.roster.active()), f"are left for round {server_round}")
        replies = method.rounds.exchange(method.configure_train(server_round, nothing, config, grid), method.next_part)
        _, metrics = method.aggregate_train(server_round, replies)
        if metrics is not None:
            result.train_metrics_clientapp[server_round] = metrics
        common = {"clients": method.rounds.roster.state(), "traffic": run.folder.ledger.state()}
        ranks = method.rounds.roster.ranks()
        run.checkpoint.save(server_round, ranks, run.identity(), {**method.state(), **common})
        method.rounds.finished = server_round
        run.progress.note("checkpoint", f"checkpoint   after round {server_round}", round=server_round)

    last, method.rounds.evaluating = method.rounds.finished, True
    _exchange_all(method, method.deliver(last))
    replies = method.rounds.exchange(method.configure_evaluate(last, nothing, config, grid))
    metrics = method.aggregate_evaluate(last, replies)
    if metrics is not None:
        result.evaluate_metrics_clientapp[last] = metrics
    return result


def _exchange_all(method: Method, parts: Iterable[Iterable[Message]]) -> None:
    """Exchange messages whose replies say no more than that they arrived."""
    for requests in parts:
        for _ in method.rounds.exchange(requests):
            pass
