"""Compared methods: FedSpine with bandits, a schedule or random choices, LoRA, and LLM-Pruner."""

from typing import Any

from benchmarks.smaller.bench import SAMPLES

BANDIT = "bandits"
PAPER = {"fedspine.exploration": 2.0, "fedspine.granularity": 0.2, "fedspine.discount": 0.95}
BY_LAYERS = {"fedspine.score": "exact", "fedspine.normalise": True, "pruning.selection": "kind"}
"""The paper's importance, by which each kind of each block loses the same ratio."""
BY_IMPORTANCE = {"federation.client-weights": "importance"}
"""The paper's weights of devices."""
BY_MASKS = {"fedspine.score": "mask", "fedspine.normalise": False, "pruning.selection": "global"}
"""Settings with which groups of all blocks compete, as in Mask Tuning's search.

Gradients of masks refer to the same loss, so that they are comparable between blocks.
"""
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
        "pruning.ratio": 0.0,
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
    "HetLoRA": {"method": "hetlora", "lora.ranks": "8,8,8,4,4,4,2,2,2,2"},
}
"""Settings of LoRA on the whole model, for the cost of pruning; ranks follow the devices' speed."""
AT_ONCE_FIRST = "all pruned in round 2"
AT_ONCE_LAST = "all pruned in the last round"
"""Name of the model that is cut at once in the last round.

This and ``AT_ONCE_FIRST`` correspond to FedLoRA + Prune and LLMPruner + FedLoRA, with FedSpine's
own cuts: each device by its own text, encoders too. In the paper both cut step by step; that is the
schedule, with another score.
"""
CUT_FIRST = {"method": "llm-pruner", "pruning.selection": "block", "data.num-samples": SAMPLES}
MERGED = {"method": "fedpetuning", "lora.merge": True, "evaluation.every": 0}
PRUNED_FIRST = "LLM-Pruner, then FedPETuning"
"""Name of one smaller model for all, cut before the rounds; the time of the cut does not count."""
CUT_LAST = {**CUT_FIRST, "llm-pruner.element": "squared", "pruning.selection": "search"}
PRUNED_LAST = "FedPETuning, then Mask Tuning"
"""Name of one smaller model for all, cut after the rounds by Mask Tuning's search.

It corresponds to FedLoRA + Prune in the paper.
"""
REFINED_LAST = "FedPETuning, then all of Mask Tuning"
"""Name of the same model with rearrangement and rescaling."""
CUTS_LAST: dict[str, tuple[str, dict[str, Any]]] = {
    PRUNED_LAST: ("Mask Tuning", CUT_LAST),
    REFINED_LAST: (
        "all of Mask Tuning",
        {**CUT_LAST, "llm-pruner.rearrange": "all", "llm-pruner.rescale": "all"},
    ),
}
"""Name of the run and its settings, by model."""


def at_once(rounds: int) -> dict[str, dict[str, Any]]:
    """Return the settings of a single cut to the full pruning ratio.

    Before tuning it uses LLM-Pruner's group score, after tuning the Fisher information of Mask
    Tuning. In the latter case, the last round trains the smaller model instead of rescaling it.
    """
    fixed = {"fedspine.allocation": "fixed", "fedspine.prune-rounds": 1}
    last = {"fedspine.prune-from": rounds, "fedspine.score": "mask", "evaluation.every": rounds}
    return {AT_ONCE_FIRST: {**fixed, "fedspine.score": "group"}, AT_ONCE_LAST: {**fixed, **last}}
