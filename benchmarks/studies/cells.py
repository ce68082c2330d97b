"""Cells of each study: one per setting and seed."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

GROUPS = ("layer", "row", "column")
STRATEGIES = ("one-shot", "iterative")
BASELINES = ("local-baseline", "centralized")
CLIENTS = 64
SAMPLES = 2
"""Number of calibration samples per client.

The paper's federation has 64 clients with 2 samples each (section 4.1).
"""
SPARSITIES = (0.5, 0.6, 0.7)
HALVINGS = (64, 32, 16, 8, 4, 2)


@dataclass(frozen=True)
class Setting:
    """Settings of the clients; cells of one setting share their masks."""

    seed: int
    clients: int = CLIENTS
    samples: int = SAMPLES
    sparsity: float = 0.5
    local_group: str = "row"


@dataclass(frozen=True)
class Cell:
    """Model whose perplexity is measured: ``dense``, a baseline, or a result of the server."""

    setting: Setting
    method: str
    server_group: str = ""
    weight_scaling: bool = False


def _common(setting: Setting) -> Iterator[Cell]:
    yield from (Cell(setting, method) for method in ("dense", *BASELINES))


def table_1(seeds: Sequence[int]) -> Iterator[Cell]:
    """Yield table 1: server comparison group, strategy and weight scaling, at three sparsities."""
    for seed, sparsity in product(seeds, SPARSITIES):
        setting = Setting(seed, sparsity=sparsity)
        yield from _common(setting)
        for group, strategy, scaling in product(GROUPS, STRATEGIES, (False, True)):
            yield Cell(setting, strategy, group, scaling)


def table_4(seeds: Sequence[int]) -> Iterator[Cell]:
    """Yield tables 4 and 8: local and server comparison group, one-shot, 50%, no weight scaling."""
    for seed, local_group in product(seeds, GROUPS):
        setting = Setting(seed, local_group=local_group)
        yield from _common(setting)
        yield from (Cell(setting, "one-shot", group) for group in GROUPS)


def figure_2(seeds: Sequence[int]) -> Iterator[Cell]:
    """Yield figure 2: 64 to 2 clients with 128 calibration samples in total."""
    for seed, clients in product(seeds, HALVINGS):
        setting = Setting(seed, clients, CLIENTS * SAMPLES // clients)
        yield from _common(setting)
        yield Cell(setting, "one-shot", "layer")


def figure_3(seeds: Sequence[int]) -> Iterator[Cell]:
    """Yield figure 3: 128 to 4 calibration samples in total, two per client."""
    for seed, clients in product(seeds, HALVINGS):
        setting = Setting(seed, clients)
        yield from _common(setting)
        yield Cell(setting, "one-shot", "layer")


STUDIES: dict[str, Callable[[Sequence[int]], Iterator[Cell]]] = {
    "table-1": table_1,
    "table-4": table_4,
    "figure-2": figure_2,
    "figure-3": figure_3,
}
