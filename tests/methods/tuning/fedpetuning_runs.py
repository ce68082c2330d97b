"""Federations of FedPETuning, and what tests read of their runs."""

from typing import Any, ClassVar

from tests.methods.promises.federations import Federations


class FedPETuningRuns(Federations):
    """Federations with two rounds of a few steps on two matrices of each block."""

    method = "fedpetuning"
    settings: ClassVar[dict[str, Any]] = {
        "federation.rounds": 2,
        "training.steps": 2,
        "training.batch-size": 2,
        "training.learning-rate": 0.01,
        "lora.rank": 2,
        "lora.alpha": 4.0,
        "lora.merge": True,
    }
    last_round = 1
    result_round = 3
    cuts_samples = "all_samples"
