"""Rewards that are known at every point of the bandit's square, and in every round: what regret is measured on."""

import math
from collections.abc import Callable
from functools import cache

import numpy as np
from numpy.typing import NDArray

from espalier.settings.seeds import derive_seed

Points = NDArray[np.float64]
Surface = Callable[[int, int, Points, Points], Points]
"""From seed, round, and both coordinates to the mean reward there, from 0 to 1."""

WIDTH = 0.2
"""Standard deviation of a hill."""
TURN = 100
SWITCH = 20
"""Rounds in which a hill goes round once, and those after which a device changes its mode, as in FedSpine section 5.1."""
GRID = 100
"""Points of each side on which a surface's best one is looked for."""


def hill(seed: int, server_round: int, u: Points, v: Points) -> Points:
    """One hill that stays where it is."""
    return _hill(u, v, 0.3, 0.7)


def moving_hill(seed: int, server_round: int, u: Points, v: Points) -> Points:
    """A hill that goes round in ``TURN`` rounds."""
    angle = 2 * math.pi * server_round / TURN
    return _hill(u, v, 0.5 + 0.3 * math.cos(angle), 0.5 + 0.3 * math.sin(angle))


def ridge(seed: int, server_round: int, u: Points, v: Points) -> Points:
    """A reward like FedSpine's: it grows with the step u and the rank v where the device keeps the others' time.

    Pruning further makes a round shorter, a higher rank makes it longer; the loss falls less the more is pruned, and more with
    a higher rank. The largest value is about 1.
    """
    return _ridge(u, v, 1.1)


def switching_ridge(seed: int, server_round: int, u: Points, v: Points) -> Points:
    """The same of a device whose speed changes every ``SWITCH`` rounds, so that other arms keep the others' time."""
    return _ridge(u, v, _pace(seed, (server_round - 1) // SWITCH))


SURFACES: dict[str, Surface] = {
    "hill": hill, "ridge": ridge, "moving hill": moving_hill, "switching ridge": switching_ridge,
}  # fmt: skip


def grid() -> tuple[Points, Points]:
    """Points that fill the square, the lower edges with it."""
    line = np.arange(GRID) / GRID
    u, v = np.meshgrid(line, line, indexing="ij")
    return u, v


def _hill(u: Points, v: Points, at_u: float, at_v: float) -> Points:
    return np.exp(-((u - at_u) ** 2 + (v - at_v) ** 2) / (2 * WIDTH**2))


def _ridge(u: Points, v: Points, pace: float) -> Points:
    seconds = 1 - 0.3 * u + 0.8 * v
    worth = 1.25 * u * (1 - 0.4 * u) * (0.6 + 0.4 * v)
    return np.minimum(1.0, worth / (1 + np.abs(seconds - pace) / (0.1 * pace)) * 1.6)


@cache
def _pace(seed: int, period: int) -> float:
    generator = np.random.default_rng(derive_seed(seed, "regret-mode", server_round=period))
    return float(generator.uniform(0.8, 1.5))
