"""Federations of mask tuning."""

from typing import Any, ClassVar

from tests.methods.promises.federations import Federations

FISHER = {"llm-pruner.element": "squared", "pruning.selection": "search"}
SMALL = {
    "pruning.ratio": 0.3,
    "llm-pruner.spare-first": 0,
    "llm-pruner.spare-last": 0,
    **FISHER,
}
TUNED = {
    **SMALL,
    "llm-pruner.rearrange": "all",
    "llm-pruner.rescale": "all",
}


# Clients with 32 tokens differ more than real ones.
NO_LIMIT = {"federation.max-weight-ratio": 1e6, "federation.max-update-ratio": 1e6}
TUNED |= NO_LIMIT


class MaskTuningRuns(Federations):
    """Federations with two rounds; both blocks of the tiny model may be pruned.

    Round 1 leads to search and rearrangement, round 2 to rescaling.
    """

    method = "llm-pruner"
    settings: ClassVar[dict[str, Any]] = TUNED
    last_round = 1
    cuts_samples = "calibration_samples"
