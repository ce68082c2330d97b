"""Settings of the compared runs, by the names of row and column; no model is opened here.

The model of the studies has 8 blocks, so the paper's pruning of models with at least 28 blocks is
scaled down: 2 blocks are dropped instead of 12.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from benchmarks.fedsoda.paper import RANK, TARGETS

DROPPED = 2
"""Number of dropped blocks, for every method that prunes."""
SODA: dict[str, Any] = {
    "method": "fedsoda", "training.base": "nf4", "training.proximal": 0.01,
    "fedsoda.adapter-layers": 3, "fedsoda.group-layers": 1, "fedsoda.groups": DROPPED,
    "fedsoda.realign-every": 5,
}  # fmt: skip
OFFSITE: dict[str, Any] = {
    "method": "fedsoda", "fedsoda.drop": "uniform", "fedsoda.group-layers": 1,
    "fedsoda.groups": DROPPED, "fedsoda.emulator": "stored",
}  # fmt: skip
"""Common settings of FedOT and FedBiOT: evenly spaced dropped blocks, no quantization."""
FEDPETUNING = "FedPETuning"
FEDOT = "FedOT"
FEDBIOT = "FedBiOT"
FEDSODA = "FedSODA"
METHODS: dict[str, dict[str, Any]] = {
    FEDPETUNING: {"method": "fedpetuning"},
    FEDOT: {
        **OFFSITE, "fedsoda.first-layers": 1, "fedsoda.adapter-layers": 2,
        "fedsoda.realign-every": 0,
    },
    FEDBIOT: {
        **OFFSITE, "fedsoda.adapter-layers": 3, "fedsoda.realign-every": 1,
        "training.proximal": 0.01,
    },
    FEDSODA: SODA,
}  # fmt: skip
IID = "IID"
ALPHAS = (5.0, 0.5, 0.1)
"""Concentrations of the Dirichlet distributions; the paper has three levels without values."""
DISTRIBUTIONS: dict[str, dict[str, Any]] = {
    IID: {},
    **{
        f"alpha {alpha:g}": {"data.partition": "dirichlet", "data.alpha": alpha} for alpha in ALPHAS
    },
}
COMMON: dict[str, Any] = {
    "num-clients": 10, "federation.rounds": 10, "federation.sampled-clients": 0.5,
    "training.steps": 2, "training.batch-size": 4, "training.learning-rate": 1e-2,
    "task.max-tokens": 64, "task.max-test-tokens": 64, "task.max-test-items": 100,
    "lora.rank": RANK, "lora.alpha": 2.0 * RANK, "lora.targets": ",".join(TARGETS),
    "evaluation.sequence-length": 64, "evaluation.max-samples": 16,
    "evaluation.local-baseline": False, "evaluation.centralized": "off",
}  # fmt: skip
"""Settings of every run, unless the command line changes them."""
ALIGNING: dict[str, Any] = {
    "public.samples": 64, "fedsoda.pre-align-steps": 40,
    "fedsoda.realign-steps": 10, "fedsoda.align-learning-rate": 5e-3,
}  # fmt: skip
"""Settings of every run with a sub-model, unless the command line changes them."""
IN_DOMAIN = "in-domain"
OUT_OF_DOMAIN = "out-of-domain"


@dataclass(frozen=True)
class Cell:
    """One run without its seed."""

    arm: str
    """Name of what is compared."""
    place: str
    """Name of the distribution of the data over clients."""
    method: Mapping[str, Any]
    """Settings of the arm."""
    spread: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the place."""
    public: str = OUT_OF_DOMAIN
    """Public text of the server."""

    def settings(self, common: Mapping[str, Any]) -> dict[str, Any]:
        """Return the flat settings of the run; those of the cell take precedence."""
        aligning = {key: value for key, value in ALIGNING.items() if self._reads(key)}
        chosen = {key: value for key, value in common.items() if self._reads(key)}
        return {**COMMON, **aligning, **chosen, **self.method, **self.spread}

    def _reads(self, key: str) -> bool:
        """Return whether the method has a key, if the key belongs to a method's table."""
        return self.method["method"] == "fedsoda" or not key.startswith(("fedsoda.", "public."))


def methods() -> Iterator[Cell]:
    """Yield four methods over four distributions, the even one first (Table 2, Figure 3)."""
    for (place, spread), (arm, settings) in product(DISTRIBUTIONS.items(), METHODS.items()):
        yield Cell(arm, place, settings, spread)


def ablation() -> Iterator[Cell]:
    """Yield runs with and without the two alignments (Tables 3 and 5)."""
    arms: dict[str, dict[str, Any]] = {
        "none": {"fedsoda.pre-align-steps": 0, "fedsoda.realign-every": 0},
        "pre": {"fedsoda.realign-every": 0},
        "realign": {"fedsoda.pre-align-steps": 0},
        "both": {},
    }
    for arm, changes in arms.items():
        yield Cell(arm, IID, {**SODA, **changes})


def combinations() -> Iterator[Cell]:
    """Yield group sizes against numbers of groups, and alignment intervals (Tables 4, 7 and 8)."""
    for pruned, groups in ((1, 2), (2, 1)):
        yield Cell(
            f"(n, p) = ({pruned}, {groups})",
            IID,
            {**SODA, "fedsoda.group-layers": pruned, "fedsoda.groups": groups},
        )
    for interval in (2, 5, 10):
        yield Cell(f"r = {interval}", IID, {**SODA, "fedsoda.realign-every": interval})


def public() -> Iterator[Cell]:
    """Yield runs with public text of the task's own or of another domain (Figure 4)."""
    for text in (IN_DOMAIN, OUT_OF_DOMAIN):
        yield Cell(text, IID, SODA, public=text)


def rounds() -> Iterator[Cell]:
    """Yield the four methods, whose adapters are scored after every round (Table 9)."""
    for arm, settings in METHODS.items():
        yield Cell(arm, IID, settings)
