"""Regret of S-UCB (FedSpine equation 7) compared with random arms and the best fixed arm.

Regret is the difference between the best arm's mean reward and that of the played arm, summed over
rounds. The rewards that the bandit sees have noise. Bandits of one seed see the same noise and the
same changes.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product

import numpy as np

from benchmarks.fedspine.surfaces import SURFACES, Points, Surface, grid
from benchmarks.reporting.rows import Rows
from espalier.seeds import derive_seed
from strategies.tuning.fedspine.bandit import Bandit, Exploration

ROUNDS = 200
MARKS = (5, 10, 15, 20, 30, 40, 50, 70, 100, 150, 200)
"""Rounds after which the regret is recorded; the paper's runs have 100 rounds, short runs 10."""
NOISE = 0.1
"""Standard deviation of the noise in a reward."""
DISCOUNTS = (0.95, 0.98, 1.0)
GRANULARITIES = (0.2, 0.4, 0.7)
EXPLORATIONS = (2.0, 0.1, 0.01)
RANDOM = "uniform random"
FIXED = "best fixed arm"
SUCB = "S-UCB"
KEYS = ("seed", "surface", "policy", "discount", "granularity", "exploration")
FIGURES = (*(f"regret_{mark}" for mark in MARKS), "cells")


@dataclass(frozen=True)
class Known:
    """Reference rewards of a surface in all rounds."""

    best: Points
    """Largest mean reward of each round, (rounds,)."""
    fixed: Points
    """Mean reward of the best fixed point, (rounds,)."""
    everywhere: Points
    """Mean over the square, which is the expectation of a random arm, (rounds,)."""


def known(surface: Surface, seed: int) -> Known:
    """Evaluate all grid points in all rounds."""
    values = np.stack([surface(seed, number, *grid()) for number in range(1, ROUNDS + 1)])
    place = np.unravel_index(values.sum(axis=0).argmax(), values.shape[1:])
    return Known(values.max(axis=(1, 2)), values[:, place[0], place[1]], values.mean(axis=(1, 2)))


def played(surface: Surface, seed: int, how: Exploration) -> tuple[list[float], int]:
    """Return the mean rewards of the arms that S-UCB plays, and its final number of cells."""
    bandit = Bandit(how)
    means = []
    noise = np.random.default_rng(derive_seed(seed, "regret-noise")).normal(0, NOISE, ROUNDS)
    for number in range(1, ROUNDS + 1):
        u, v = bandit.draw(seed, 0, number)
        means.append(float(surface(seed, number, np.array(u), np.array(v))))
        bandit = bandit.learn(u, v, min(1.0, max(0.0, means[-1] + noise[number - 1])), number)
    return means, len(bandit.cells)


def measure(rows: Rows, seeds: list[int]) -> None:
    """Measure all policies on all surfaces, except existing rows."""
    for seed, name in product(seeds, SURFACES):
        cells = list(_cells(seed, name))
        if not (missing := rows.missing(iter(cells))):
            continue
        about = known(SURFACES[name], seed)
        for cell in missing:
            if cell["policy"] == SUCB:
                how = Exploration(cell["discount"], cell["granularity"], cell["exploration"])
                means, number = played(SURFACES[name], seed, how)
                _add(rows, cell, about.best - np.array(means), float(number))
            else:
                _add(
                    rows,
                    cell,
                    about.best - (about.everywhere if cell["policy"] == RANDOM else about.fixed),
                    None,
                )


def _cells(seed: int, surface: str) -> Iterator[dict[str, object]]:
    for policy in (RANDOM, FIXED):
        yield dict(zip(KEYS, (seed, surface, policy, "", "", ""), strict=True))
    for values in product(DISCOUNTS, GRANULARITIES, EXPLORATIONS):
        yield dict(zip(KEYS, (seed, surface, SUCB, *values), strict=True))


def _add(rows: Rows, cell: Mapping[str, object], regrets: Points, cells: float | None) -> None:
    total = np.cumsum(regrets)
    rows.add(cell, **{f"regret_{mark}": float(total[mark - 1]) for mark in MARKS}, cells=cells)
