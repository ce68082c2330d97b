"""Known reward surfaces over the bandit's square, with which regret is measured."""

import math
from collections.abc import Callable
from functools import cache

import numpy as np
from numpy.typing import NDArray

from espalier.seeds import derive_seed

Points = NDArray[np.float64]
Surface = Callable[[int, int, Points, Points], Points]
"""Return the mean reward, from 0 to 1, given seed, round and both coordinates."""

WIDTH = 0.2
"""Standard deviation of a hill."""
TURN = 100
SWITCH = 20
"""Number of rounds between two changes of a device's mode, as in FedSpine section 5.1.

``TURN`` is the number of rounds in which a hill moves around once.
"""
GRID = 100
"""Number of grid points per side for the search of a surface's maximum."""


def hill(seed: int, server_round: int, u: Points, v: Points) -> Points:
    """Return the reward of one static hill."""
    return _hill(u, v, 0.3, 0.7)


def moving_hill(seed: int, server_round: int, u: Points, v: Points) -> Points:
    """Return the reward of a hill that moves around a circle in ``TURN`` rounds."""
    angle = 2 * math.pi * server_round / TURN
    return _hill(u, v, 0.5 + 0.3 * math.cos(angle), 0.5 + 0.3 * math.sin(angle))


def ridge(seed: int, server_round: int, u: Points, v: Points) -> Points:
    """Return a reward like FedSpine's, of a device with constant speed.

    It grows with the step u and the rank v as long as the device's time equals that of the others.
    A larger pruning step shortens a round, a higher rank prolongs it. The loss decreases less with
    more pruning, and more with a higher rank. The maximum is about 1.
    """
    return _ridge(u, v, 1.1)


def switching_ridge(seed: int, server_round: int, u: Points, v: Points) -> Points:
    """Return the reward of a device whose speed changes every ``SWITCH`` rounds.

    The arms that match the time of the others change with it.
    """
    return _ridge(u, v, _pace(seed, (server_round - 1) // SWITCH))


SURFACES: dict[str, Surface] = {
    "hill": hill, "ridge": ridge, "moving hill": moving_hill, "switching ridge": switching_ridge,
}  # fmt: skip


def grid() -> tuple[Points, Points]:
    """Return grid points of the square, including the lower edges."""
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
