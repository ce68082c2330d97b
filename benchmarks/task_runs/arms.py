"""Runs that are compared on a task, by name."""

from dataclasses import dataclass, field, replace
from typing import Any

Settings = dict[str, Any]
COMMON: Settings = {
    "federation.rounds": 5, "training.steps": 6, "training.batch-size": 4,
    "training.learning-rate": 1e-3, "lora.targets": "all", "task.max-tokens": 128,
    "task.max-test-tokens": 256, "evaluation.local-baseline": False,
    "evaluation.centralized": "off", "evaluation.max-samples": 8,
}  # fmt: skip
"""Settings of every run: 30 steps of every client, with adapters of rank 8 on all matrices."""
TASKS: dict[str, Settings] = {
    "dolly": {"task.max-test-items": 80},
    "sst2": {"task.max-test-items": 200, "data.partition": "dirichlet", "data.alpha": 0.5},
    "arc-easy": {"task.max-test-items": 100},
}
"""Settings by task; a file for each client, or one that is distributed to the clients."""
SODA: Settings = {
    "method": "fedsoda", "public.samples": 64, "fedsoda.pre-align-steps": 40,
    "fedsoda.realign-steps": 10, "fedsoda.realign-every": 2,
}  # fmt: skip
"""FedSODA with the paper's three adapter layers, and four groups from which three blocks each are
dropped, and a shorter alignment."""
NEVER_ALIGNED: Settings = {"fedsoda.pre-align-steps": 0, "fedsoda.realign-every": 0}

BASE = "FedPETuning"
"""Arm with which the others are compared."""
EXACT = {"FFA-LoRA": "ffa", "RoLoRA": "rolora", "FedEx-LoRA": "fedex"}
"""Settings ``fedpetuning.aggregation`` of methods with exact means."""
FED_SB: Settings = {"method": "fed-sb", "training.learning-rate": 1e-2}
"""Fed-SB with a larger learning rate than the others, because it trains far fewer numbers."""
FED_SB_64: Settings = {**FED_SB, "lora.rank": 64, "lora.alpha": 128.0}
"""Fed-SB with four times the numbers; the rate of 0.01 is too large for it."""
BY_NORMS: Settings = {"federation.client-weights": "norms"}
BY_SAMPLES: Settings = {"federation.client-weights": "samples"}
"""Weights of clients in HetLoRA, and in raFLoRA."""
UNLIMITED: Settings = {"federation.max-weight-ratio": 1e6}
"""The paper's weights: a client that alone has a rank has all of its weight."""
LORA = (
    "FedPETuning", "HetLoRA", *EXACT, "HetLoRA, svd", "raFLoRA", "raFLoRA, zero-pad", "FLoRA",
    "raFLoRA, limited", "HetLoRA, by samples", "HetLoRA, by samples, unlimited",
    "raFLoRA, by samples", "raFLoRA, by samples, limited", "FLoRA, rank 8", "Fed-SB",
    "Fed-SB, rank 64", "Fed-SB, rank 64, rate 0.003",
)  # fmt: skip
"""Arms of federated LoRA, which ``--equal bytes`` compares."""


@dataclass(frozen=True)
class Arm:
    """One run, and the run that makes its base model smaller, if there is one."""

    settings: Settings
    first: Settings = field(default_factory=dict)


def _fixed(method: str, ratio: float) -> Settings:
    samples = {"data.num-samples": 32, "data.sequence-length": 256}
    return {"method": method, "pruning.ratio": ratio, **samples}


def _het(aggregation: str, rank_weights: str) -> Settings:
    return {
        "method": "hetlora",
        "lora.ranks": "2,4,8",
        "hetlora.aggregation": aggregation,
        "hetlora.rank-weights": rank_weights,
        **BY_NORMS,
    }


def _personal(method: str, settings: Settings) -> Arm:
    """Return a method whose clients end with models of their own, and score them."""
    return Arm({"method": method, "evaluation.local-baseline": True, **settings})


def _spine(ratio: float, **other: Any) -> Arm:
    """Return FedSpine with the paper's importance and weights; ``other`` are further settings."""
    paper = {"score": "exact", "normalise": True, "selection": "kind"}
    named = {
        f"{'pruning' if key == 'selection' else 'fedspine'}.{key}": value
        for key, value in (paper | other).items()
    }
    weights = {"federation.client-weights": "importance"}
    return _personal("fedspine", {"pruning.ratio": ratio, **weights, **named})


COMPETING = {"score": "mask", "normalise": False, "selection": "global"}
"""FedSpine's groups of all blocks compete, by the gradients of masks on their outputs."""


def _weighted(ratio: float, weights: str) -> Arm:
    """Return FedSpine with a schedule and weights of the mean; ratio 0: nothing is pruned."""
    arm = _spine(ratio, allocation="fixed", **(COMPETING if ratio else {}))
    return replace(arm, settings={**arm.settings, "federation.client-weights": weights})


PRIVATE_RATE = 0.025
"""Probability with which a record takes part in a private step: 37 of Dolly's 1,490 per client."""


def _private(epsilon: float) -> Arm:
    """Return FedPETuning with DP-SGD; noise from the seed repeats, and protects nothing."""
    privacy = {"epsilon": epsilon, "noise": "seed", "sampling-rate": PRIVATE_RATE}
    settings = {f"privacy.{key}": value for key, value in privacy.items()}
    return Arm({"method": "fedpetuning", "federation.client-weights": "equal", **settings})


SFT_P_RATES = (0.01, 0.03, 0.1)
"""Learning rates of SFT-P's generator and embeddings, besides 0.003."""


ARMS: dict[str, Arm] = {
    "FedPETuning": Arm({"method": "fedpetuning", "evaluation.local-baseline": True}),
    "HetLoRA": Arm({"method": "hetlora", "lora.ranks": "2,4,8"}),
    **{name: Arm({"method": "fedpetuning", "fedpetuning.aggregation": aggregation})
       for name, aggregation in EXACT.items()},
    "HetLoRA, svd": Arm(_het("svd", "all")),
    **{f"FedPETuning, epsilon {epsilon:g}": _private(epsilon) for epsilon in (8.0, 4.0, 2.0, 1.0)},
    "raFLoRA": Arm(_het("svd", "holders") | UNLIMITED),
    "raFLoRA, zero-pad": Arm(_het("zero-pad", "holders") | UNLIMITED),
    "raFLoRA, limited": Arm(_het("zero-pad", "holders")),
    "HetLoRA, by samples": Arm(_het("zero-pad", "all") | BY_SAMPLES),
    "HetLoRA, by samples, unlimited": Arm(_het("zero-pad", "all") | BY_SAMPLES | UNLIMITED),
    "raFLoRA, by samples": Arm(_het("zero-pad", "holders") | BY_SAMPLES | UNLIMITED),
    "raFLoRA, by samples, limited": Arm(_het("zero-pad", "holders") | BY_SAMPLES),
    "FLoRA": Arm({"method": "flora", "lora.ranks": "2,4,8"}),
    "FLoRA, rank 8": Arm({"method": "flora"}),
    "Fed-SB": Arm({**FED_SB, "lora.rank": 32, "lora.alpha": 64.0}),
    "Fed-SB, rank 64": Arm(FED_SB_64),
    "Fed-SB, rank 64, rate 0.003": Arm({**FED_SB_64, "training.learning-rate": 3e-3}),
    "FedSODA": Arm(SODA),
    "SFT-P, 20%": _personal("sft-p", {"pruning.ratio": 0.2, "sft-p.learning-rate": 3e-3}),
    **{
        f"SFT-P, rate {rate:g}, {ratio}%": _personal(
            "sft-p", {"pruning.ratio": ratio / 100, "sft-p.learning-rate": rate}
        )
        for ratio in (20, 50)
        for rate in SFT_P_RATES
    },
    "FedSpine, 20%": _spine(0.2),
    "LLM-Pruner, FedPETuning, 20%": Arm({"method": "fedpetuning"}, _fixed("llm-pruner", 0.2)),
    "FedOT": Arm({
        **SODA, "fedsoda.first-layers": 1, "fedsoda.adapter-layers": 2, "fedsoda.drop": "uniform",
        "fedsoda.uniform-rounding": "down", "fedsoda.emulator": "stored",
        "fedsoda.realign-every": 0, "fedsoda.pre-align-steps": 0,
    }),
    "FedBiOT": Arm({
        **SODA, "fedsoda.drop": "uniform", "fedsoda.uniform-rounding": "down",
        "fedsoda.emulator": "stored", "fedsoda.realign-every": 1, "training.proximal": 0.01,
    }),
    "FedSODA, never aligned": Arm(SODA | NEVER_ALIGNED),
    "FedSODA, 4 blocks dropped": Arm({**SODA, "fedsoda.group-layers": 1}),
    "FedSODA, 4 blocks dropped, never aligned": Arm({
        **SODA, **NEVER_ALIGNED, "fedsoda.group-layers": 1,
    }),
    "FedSODA, 1 block dropped, never aligned": Arm({
        **SODA, **NEVER_ALIGNED, "fedsoda.group-layers": 1, "fedsoda.groups": 1,
    }),
    "FedSODA, no block dropped": Arm({**SODA, **NEVER_ALIGNED, "fedsoda.group-layers": 0}),
    "FedSODA, no block dropped, as stored": Arm({
        **SODA, **NEVER_ALIGNED, "fedsoda.group-layers": 0, "fedsoda.emulator": "stored",
    }),
    "FedSODA, aligned before": Arm({**SODA, "fedsoda.realign-every": 0}),
    "FedSODA, aligned between": Arm({**SODA, "fedsoda.pre-align-steps": 0}),
    "SFT-P, 50%": _personal("sft-p", {"pruning.ratio": 0.5, "sft-p.learning-rate": 3e-3}),
    "FedSpine, 50%": _spine(0.5),
    "LLM-Pruner, FedPETuning, 50%": Arm({"method": "fedpetuning"}, _fixed("llm-pruner", 0.5)),
    **{f"FedSpine, {name}, {ratio}%": _spine(ratio / 100, allocation="fixed", **settings)
       for ratio in (20, 50)
       for name, settings in (("schedule", {}), ("schedule, all compete", COMPETING),
                              ("schedule, masks", COMPETING | {"selection": "kind"}))},
    **{f"FedSpine, bandits, all compete, {ratio}%": _spine(ratio / 100, **COMPETING)
       for ratio in (20, 50)},
    **{f"FedSpine, {weights}, {ratio}%": _weighted(ratio / 100, weights)
       for ratio in (0, 20)
       for weights in ("importance", "samples", "importance-samples")},
}  # fmt: skip
