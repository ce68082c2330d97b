"""Pooled pruning next to other masks, one party with all text, and one without the others."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

from benchmarks.pooled.mask_runs import FIGURES, KEYS, MaskRun, measure
from benchmarks.reporting.paired_comparison import Pair
from benchmarks.reporting.perplexity_report import Study
from benchmarks.reporting.rows import Rows
from benchmarks.smaller.bench import Bench

SPARSITIES = (0.5, 0.6, 0.7)
PATTERN = "2:4"
ONE_PASS = "pooled, one dense pass"
BLOCKS = "pooled, block by block"
BY_ROW = "FedPrLLM by row"
METHODS: dict[str, dict[str, Any]] = {
    ONE_PASS: {"method": "pooled-pruning"},
    BLOCKS: {"method": "pooled-pruning", "pruning.strategy": "iterative"},
    "pooled, equal clients, block by block": {
        "method": "pooled-pruning", "pruning.strategy": "iterative",
        "pooled-pruning.weighting": "equal",
    },
    "pooled RIA, block by block": {
        "method": "pooled-pruning", "pruning.strategy": "iterative", "pruning.metric": "ria",
    },
    "FedPrLLM": {"method": "fedprllm"},
    "FedPrLLM, block by block": {"method": "fedprllm", "pruning.strategy": "iterative"},
    BY_ROW: {"method": "fedprllm", "fedprllm.vote-group": "row"},
    "FedSpaLLM": {"method": "fedspallm"},
    "FedSpaLLM, Wanda": {"method": "fedspallm", "fedspallm.local-method": "wanda"},
}  # fmt: skip
"""Settings by name."""
BASELINES = {"local_baseline": "local Wanda", "centralized": "centralized Wanda"}
"""Names of the baselines, which the run of ``BLOCKS`` makes, by column of its summary."""


def study(methods: Sequence[str]) -> Study:
    """Return the study of some methods, by their names in ``METHODS``."""
    return replace(STUDY, work=partial(quality, methods=methods))


def quality(bench: Bench, rows: Rows, methods: Sequence[str] = ()) -> None:
    """Measure perplexity per text and bytes per client, for some methods or all."""
    amounts = [(sparsity, "") for sparsity in SPARSITIES] + [(0.5, PATTERN)]
    for seed, (sparsity, pattern), name in product(bench.seeds, amounts, methods or METHODS):
        if pattern and name == BY_ROW:
            continue  # a pattern replaces the comparison group
        measure(
            bench, rows, MaskRun(name, METHODS[name], _baselines(name), seed, sparsity, pattern)
        )


def _baselines(name: str) -> dict[str, str]:
    return BASELINES if name == BLOCKS else {}


def _pairs() -> Iterator[Pair]:
    for other in ("FedPrLLM", "FedPrLLM, block by block", "FedSpaLLM", *BASELINES.values()):
        yield Pair(BLOCKS, other)
    yield Pair(BLOCKS, ONE_PASS)
    yield Pair("pooled RIA, block by block", BLOCKS)


STUDY = Study(
    "Pooled pruning and the other methods of unstructured pruning",
    KEYS,
    FIGURES,
    quality,
    tuple(_pairs()),
    variants={f", {PATTERN}": f"{PATTERN} (half of the weights)", "": "no pattern"},
    ordered=True,
)
