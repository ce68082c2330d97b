"""Claims of the papers of FedPrLLM and FedSpaLLM, with complete runs, one client per domain."""

from itertools import product
from typing import Any

from benchmarks.pooled.mask_runs import FIGURES, KEYS, MaskRun, measure
from benchmarks.reporting.paired_comparison import Pair
from benchmarks.reporting.perplexity_report import Study
from benchmarks.reporting.rows import Rows
from benchmarks.smaller.bench import Bench

SPARSITIES = (0.5, 0.7)
VOTES = "FedPrLLM"
KEPT = "FedSpaLLM"
METHODS: dict[str, dict[str, Any]] = {
    VOTES: {"method": "fedprllm"},
    f"{VOTES}, scaled": {"method": "fedprllm", "fedprllm.weight-scaling": True},
    f"{VOTES} by row": {"method": "fedprllm", "fedprllm.vote-group": "row"},
    f"{VOTES} by column": {"method": "fedprllm", "fedprllm.vote-group": "column"},
    f"{VOTES}, block by block": {"method": "fedprllm", "pruning.strategy": "iterative"},
    KEPT: {"method": "fedspallm"},
    f"{KEPT}, plain mean": {"method": "fedspallm", "fedspallm.aggregation": "mean"},
    f"{KEPT}, half of the layers": {"method": "fedspallm", "fedspallm.sampled-layers": 0.5},
}
"""Settings by name."""
BASELINES = {
    VOTES: {"local_baseline": "one client, Wanda", "centralized": "all text, Wanda"},
    KEPT: {"local_baseline": "one client, SparseGPT", "centralized": "all text, SparseGPT"},
}
"""Names of the baselines that a run makes, by method and column of its summary."""


def claims(bench: Bench, rows: Rows) -> None:
    """Measure perplexity per text and bytes per client, for all methods and sparsities."""
    for seed, sparsity, (name, settings) in product(bench.seeds, SPARSITIES, METHODS.items()):
        run = MaskRun(name, settings, BASELINES.get(name, {}), seed, sparsity)
        measure(bench, rows, run)


def _pairs() -> tuple[Pair, ...]:
    variants = [(name, VOTES if name.startswith(VOTES) else KEPT) for name in METHODS]
    baselines = [(other, name) for name, made in BASELINES.items() for other in made.values()]
    return tuple(Pair(name, base) for name, base in [*variants, *baselines] if name != base)


STUDY = Study("Claims of FedPrLLM and FedSpaLLM", KEYS, FIGURES, claims, _pairs(), ordered=True)
