"""What is compared: FedSpine with bandits, a schedule or chance, LoRA of the whole model, and models that LLM-Pruner cuts."""

from typing import Any

from benchmarks.smaller.bench import WINDOWS

BANDIT = "bandits"
PAPER = {"fedspine.exploration": 2.0, "fedspine.granularity": 0.2, "fedspine.discount": 0.95}
BY_MASKS = {"fedspine.score": "mask", "fedspine.normalise": False, "fedspine.selection": "global"}
"""Units of all blocks compete, as in Mask Tuning's search: gradients of masks are of the same loss, so that they can."""
CHOICES: dict[str, dict[str, Any]] = {
    BANDIT: {},
    "bandits, the paper's factor": PAPER,
    "bandits, the paper's arms and reward": {
        **PAPER,
        "fedspine.arm-space": "absolute",
        "fedspine.reward": "literal",
    },
    "bandits, one rank (w/o A_T)": {"fedspine.adaptive-rank": False},
    "bandits, one ratio": {"fedspine.adaptive-pruning": False},
    "bandits, nothing pruned (w/o A_P)": {
        "fedspine.adaptive-pruning": False,
        "fedspine.share": 0.0,
    },
    "chance": {"fedspine.allocation": "random"},
    "schedule": {"fedspine.allocation": "fixed"},
    "schedule, rank 2": {"fedspine.allocation": "fixed", "fedspine.rank": 2},
    "FedAPT": {"fedspine.allocation": "fixed", "fedspine.score": "mask", "fedspine.eta": 0.85},
    "schedule, zero-fill": {"fedspine.allocation": "fixed", "fedspine.aggregation": "zero-fill"},
    "bandits, by masks of the whole model": BY_MASKS,
    "schedule, by masks of the whole model": {"fedspine.allocation": "fixed", **BY_MASKS},
}
"""Settings of FedSpine by name."""
UNPRUNED: dict[str, dict[str, Any]] = {
    "FedPETuning": {"method": "fedpetuning", "lora.merge": True},
    "HetLoRA": {"method": "hetlora", "hetlora.ranks": "8,8,8,4,4,4,2,2,2,2"},
}
"""LoRA of the whole model, for the perplexity that pruning costs; ranks by what the fleet's devices can do."""
AT_ONCE_FIRST = "all pruned in round 2"
AT_ONCE_LAST = "all pruned in the last round"
"""What LLMPruner + FedLoRA and FedLoRA + Prune do, by FedSpine's own cuts: each device by its own text, encoders too. The paper
lets both cut step by step; that is the schedule, with another score."""
CUT_FIRST = {"method": "llm-pruner", "llm-pruner.selection": "block", "data.windows": WINDOWS}
MERGED = {"method": "fedpetuning", "lora.merge": True, "evaluation.every": 0}
PRUNED_FIRST = "LLM-Pruner, then FedPETuning"
"""One smaller model for all, cut before the rounds begin; what the cut itself takes is not counted."""
CUT_LAST = {**CUT_FIRST, "llm-pruner.element": "squared", "llm-pruner.selection": "search"}
PRUNED_LAST = "FedPETuning, then Mask Tuning"
"""One smaller model for all, cut when the rounds are over (FedLoRA + Prune), by the search of Mask Tuning alone."""
REFINED_LAST = "FedPETuning, then all of Mask Tuning"
"""The same, rearranged and rescaled too."""
CUTS_LAST: dict[str, tuple[str, dict[str, Any]]] = {
    PRUNED_LAST: ("Mask Tuning", CUT_LAST),
    REFINED_LAST: (
        "all of Mask Tuning",
        {**CUT_LAST, "llm-pruner.rearrange": "all", "llm-pruner.rescale": "all"},
    ),
}
"""Name of the run and settings of each."""


def at_once(rounds: int) -> dict[str, dict[str, Any]]:
    """One cut to the whole share, by LLM-Pruner's rule of groups before tuning, by the Fisher of Mask Tuning after it.

    The last round tunes what it has cut for its steps, in place of rescaling.
    """
    fixed = {"fedspine.allocation": "fixed", "fedspine.prune-rounds": 1}
    last = {"fedspine.prune-from": rounds, "fedspine.score": "mask", "evaluation.every": rounds}
    return {AT_ONCE_FIRST: {**fixed, "fedspine.score": "group"}, AT_ONCE_LAST: {**fixed, **last}}
