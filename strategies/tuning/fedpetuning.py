"""FedPETuning (Zhang et al. 2023): federated averaging of LoRA adapters.

The paper averages the factors A and B, which is not the same as averaging the updates B A. With
``aggregation = "svd"`` the updates are averaged, and the best approximation with the adapters' rank
is kept. With ``"fedex"`` (Singhal et al. 2024) the factors are averaged, and the residual of the
mean of the updates is folded into the base. With ``"ffa"`` (Sun et al. 2024) and ``"rolora"`` (Chen
et al. 2024) only one factor is trained in a round, so that its mean is the mean of the updates.
"""

from functools import partial

from strategies.averaging.adapter_averager import Tuning
from strategies.averaging.folded_updates import FoldedResult
from strategies.base.inbox import Inbox


class FedPETuning(Tuning):
    """Strategy of FedPETuning: federated averaging of adapters."""

    RESULT = FoldedResult
    result: FoldedResult

    def fold(self, server_round: int, inbox: Inbox, clients: list[int]) -> None:
        """Average the adapters blob by blob, in client order; fold a residual into the base."""
        # None averages by the settings; a residual exists only with ``aggregation = "fedex"``.
        folds = self.averager.job.rank_folded_by(self.run.settings)
        mean = partial(self.result.with_residual, server_round) if folds else None
        self.averager.fold(server_round, inbox, clients, mean)
        # All matrices are folded by now, so clients of the next round expect this rank.
        self.result.finish(server_round)
