"""FedPETuning (Zhang et al. 2023): federated averaging of LoRA adapters.

The paper averages the factors A and B, which is not the same as averaging the updates B A. With
``aggregation = "svd"`` the updates are averaged, and the best approximation with the adapters' rank
is kept.
"""

from strategies.averaging.adapter_averager import AdapterAverager, Tuning
from strategies.averaging.adapters import AdapterResult
from strategies.base.evaluation import ClientEvaluation
from strategies.base.run import Run


class FedPETuning(Tuning):
    """Strategy of FedPETuning: federated averaging of adapters."""

    result: AdapterResult

    def __init__(self, run: Run, evaluation: ClientEvaluation) -> None:
        super().__init__(run, evaluation)
        self.result = self.RESULT(run.settings, run.model, run.checkpoint.blobs)
        self.averager = AdapterAverager(
            run, lambda: self.result, brings_result=run.settings.evaluation.own_text
        )
