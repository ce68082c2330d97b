"""FedPETuning (Zhang et al. 2023): federated averaging of LoRA adapters.

The paper averages the factors A and B, which is not the same as averaging the updates B A. With
``aggregation = "svd"`` the updates are averaged, and the best approximation with the adapters' rank
is kept. With ``"fedex"`` (Singhal et al. 2024) the factors are averaged, and the residual of the mean
of the updates is folded into the base. With ``"ffa"`` (Sun et al. 2024) and ``"rolora"`` (Chen et al.
2024) only one factor is trained in a round, so that the mean of that factor is the mean of the
updates.
"""

from functools import partial

from strategies.averaging.adapter_averager import AdapterAverager, Tuning
from strategies.averaging.folded_updates import FoldedResult
from strategies.base.evaluation import ClientEvaluation
from strategies.base.inbox import Inbox
from strategies.base.run import Run


class FedPETuning(Tuning):
    """Strategy of FedPETuning: federated averaging of adapters."""

    RESULT = FoldedResult
    result: FoldedResult

    def __init__(self, run: Run, evaluation: ClientEvaluation) -> None:
        super().__init__(run, evaluation)
        self.result = self.RESULT(run.settings, run.model, run.checkpoint.blobs)
        self.averager = AdapterAverager(
            run, lambda: self.result, brings_result=run.settings.evaluation.own_text
        )

    def fold(self, server_round: int, inbox: Inbox, clients: list[int]) -> None:
        """Average the adapters blob by blob, in client order; fold a residual into the base."""
        if not self.averager.job.rank_folded_by(self.run.settings):
            super().fold(server_round, inbox, clients)
            return
        averager = self.averager
        updates = averager.updates(server_round, inbox, clients)
        averager.note_times(server_round, updates.clients)
        weights = averager.samples_of(updates.clients)
        mean = partial(self.result.with_residual, server_round)
        averager.average(updates, weights, averager.limits_after(server_round), mean)
        self.result.folded = self.result.folded_after(server_round)
