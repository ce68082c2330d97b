"""S-UCB: a bandit per device over the unit square (FedSpine section 4.1.2, algorithm 1).

The square is divided into cells, the leaves of the paper's tree. Each round selects the cell with
the largest upper confidence bound and draws a point in it. If the cell is larger than
``granularity``, it is then split at that point. Rewards of earlier rounds count less. Points and
rewards get their meaning in ``ArmSpace`` and in ``reward.py``.

Differences from the paper: line 4 of algorithm 1 lacks the argmax, and line 9 is blank; here the
partition is kept. Cells are half-open, so that a point on a border belongs to one cell only. ``log
n_t`` in equation 5 is negative for ``n_t < 1``, as in round 2, so this code uses ``log(1 + n_t)``;
its factor is ``exploration`` (2 in the paper). A cell without a point has no mean; it precedes all
others, and ties are broken at random.

The paper's arm space is ``[p_{t-1}, p*] x [r_min, r_max]``. After a round, all played points lie at
or below ``p_{t-1}`` and cannot be played again, so the paper's bandit is reset in every round;
this is ``absolute``. With ``relative`` a point gives the next pruning step, so it has the same
meaning in every round.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from espalier.seeds import derive_seed

PURPOSE = "bandit"
"""Purpose name of the seeds for the bandit's draws."""
SMALLEST_PART = 0.25
"""Minimum side of a cell after a split, as a fraction of ``granularity``."""


@dataclass(frozen=True)
class Cell:
    """Rectangle of the points (u, v) with ``left <= u < right`` and ``low <= v < high``."""

    left: float
    right: float
    low: float
    high: float

    def holds(self, u: float, v: float) -> bool:
        """Return whether the cell contains the point."""
        return self.left <= u < self.right and self.low <= v < self.high

    @property
    def diameter(self) -> float:
        """Length of the diagonal; the paper does not define its diameter."""
        return math.hypot(self.right - self.left, self.high - self.low)


WHOLE = Cell(0.0, 1.0, 0.0, 1.0)


@dataclass(frozen=True)
class Pull:
    """Point that was played, with its reward."""

    u: float
    v: float
    reward: float
    round: int


@dataclass(frozen=True)
class Exploration:
    """Parameters of S-UCB; the paper gives only the factor 2 of equation 5.

    The defaults are for rewards from 0 to 1 and a few hundred rounds. With the paper's factor, the
    bound is far above any reward, and the bandit is hardly better than random arms. A small
    granularity makes more cells than there are rounds to visit each of them twice (``python -m
    benchmarks.fedspine regret``).
    """

    discount: float = 0.98
    """Discount lambda of equation 4, in (0, 1]: a reward from k rounds ago has weight lambda^k."""
    granularity: float = 0.4
    """Threshold delta of algorithm 1, above 0: only cells with a larger diameter are split."""
    exploration: float = 0.01
    """Factor xi >= 0, which replaces the 2 of equation 5."""


@dataclass(frozen=True)
class Bandit:
    """State of one device's bandit; immutable, so that a checkpoint can store it."""

    how: Exploration
    cells: tuple[Cell, ...] = (WHOLE,)
    """Cells that tile the square."""
    history: tuple[Pull, ...] = ()
    """Points that were played, ascending by round."""

    def draw(
        self, seed: int, device: int, server_round: int, least: float = 0.0
    ) -> tuple[float, float]:
        """Draw the point (u, v) in [0, 1) x [0, 1) to play.

        Parameters
        ----------
        seed, device, server_round : they determine the random stream
        least : minimum u in [0, 1] (the paper's shrinking arm space); cells are truncated there. At
            1 the rightmost cells are used whole, because u then has no effect
        """
        if least >= 1:
            # At 1 every cell would be truncated to nothing.
            cells = [cell for cell in self.cells if cell.right == 1]
        else:
            playable = [cell for cell in self.cells if cell.right > least]
            cells = [replace(cell, left=max(cell.left, least)) for cell in playable]
        bounds = self.bounds(cells, server_round)
        largest = max(bounds)
        # The stream depends on run, device and round only.
        generator = np.random.default_rng(
            derive_seed(seed, PURPOSE, client=device, server_round=server_round)
        )
        # Ties, for instance of cells without a point, are broken at random.
        best = [cell for cell, bound in zip(cells, bounds, strict=True) if bound == largest]
        chosen = best[int(generator.integers(len(best)))]
        return _within(chosen.left, chosen.right, generator.random()), _within(
            chosen.low, chosen.high, generator.random()
        )

    def learn(self, u: float, v: float, reward: float, server_round: int) -> "Bandit":
        """Return the bandit after a point was played with a finite reward.

        A device without a valid reply gives no reward, so nothing is learned from it.
        """
        # Cells are half-open and tile the square, so exactly one holds the point.
        (place,) = (place for place, cell in enumerate(self.cells) if cell.holds(u, v))
        cells = self.cells
        cell = self.cells[place]
        # Split at the point, as long as the cell is large.
        if cell.diameter > self.how.granularity:
            # There are 4 parts, or fewer if one would be too thin.
            thinnest = SMALLEST_PART * self.how.granularity
            columns = _cut(cell.left, u, cell.right, thinnest)
            rows = _cut(cell.low, v, cell.high, thinnest)
            parts = tuple(Cell(*column, *row) for column in columns for row in rows)
            cells = (*cells[:place], *parts, *cells[place + 1 :])
        return replace(
            self, cells=cells, history=(*self.history, Pull(u, v, float(reward), server_round))
        )

    def bounds(self, cells: Sequence[Cell], server_round: int) -> list[float]:
        """Return U_t of each cell (equations 4 to 6).

        It is infinite for cells without a point, or if the weights of all their points are 0.
        """
        edges = np.array([(cell.left, cell.right, cell.low, cell.high) for cell in cells])
        # (cells, 1) each, to be compared with (1, pulls).
        left, right, low, high = edges.T[:, :, None]
        pulls = [(pull.u, pull.v, pull.reward, pull.round) for pull in self.history]
        # (4, pulls), also without pulls.
        points = np.array(pulls).reshape(-1, 4).T
        u, v = points[:2]
        inside = (left <= u) & (u < right) & (low <= v) & (v < high)
        # Equation 4: discounted number of plays.
        counted = self.how.discount ** (server_round - points[3])
        counts = np.where(inside, counted, 0).sum(axis=1)
        sums = np.where(inside, counted * points[2], 0).sum(axis=1)
        # log(1 + n_t), see above.
        spread = self.how.exploration * math.log1p(float(counts.sum()))
        return [
            # Mean plus confidence (equations 5 and 6).
            math.inf if count == 0 else float(total / count) + math.sqrt(spread / count)
            for count, total in zip(counts.tolist(), sums.tolist(), strict=True)
        ]

    def to_json(self) -> dict[str, Any]:
        """Return JSON values; JSON keeps all digits of the floats."""
        return {
            "discount": self.how.discount,
            "granularity": self.how.granularity,
            "exploration": self.how.exploration,
            "cells": [[cell.left, cell.right, cell.low, cell.high] for cell in self.cells],
            "history": [[pull.u, pull.v, pull.reward, pull.round] for pull in self.history],
        }

    @staticmethod
    def from_json(document: Any) -> "Bandit":
        """Read the values that ``to_json`` returned."""
        how = (document[key] for key in ("discount", "granularity", "exploration"))
        cells = tuple(Cell(*edges) for edges in document["cells"])
        return Bandit(Exploration(*how), cells, tuple(Pull(*pull) for pull in document["history"]))


def _cut(start: float, at: float, end: float, thinnest: float) -> tuple[tuple[float, float], ...]:
    if min(at - start, end - at) < thinnest:
        return ((start, end),)
    return (start, at), (at, end)


def _within(start: float, end: float, share: float) -> float:
    """Return a point of [start, end); rounding cannot move it to the end."""
    # ``random`` is below 1, but the product may round up to the end.
    return min(start + (end - start) * share, math.nextafter(end, start))


Kind = Literal["relative", "absolute"]
ROUNDING = 4 * sys.float_info.epsilon
"""Bound on the relative rounding error of a product and a quotient of floats."""


@dataclass(frozen=True)
class Refinement:
    """Request to a device in a round."""

    pruned: float
    """Pruning ratio p_t after this round's cut, never below the one before."""
    rank: int
    """Rank r_t of the device's LoRA adapters."""


@dataclass(frozen=True)
class ArmSpace:
    """Pruning ratios and ranks of one device."""

    target: float
    """Target pruning ratio p*, in [0, 1)."""
    largest_step: float
    """Maximum step Delta_max of ``relative``, in (0, 1]; see ``step_for``."""
    lowest_rank: int
    highest_rank: int
    kind: Kind = "relative"

    def least(self, pruned: float) -> float:
        """Return the u below which no arm can be played, for ``Bandit.draw``.

        ``pruned`` is the device's present pruning ratio. With ``absolute``, the result is never
        above the u that led to this ratio, despite rounding.
        """
        if self.kind == "relative":
            return 0.0
        # Slightly lower, so that rounding cannot exclude the point that led to the present ratio.
        return pruned / self.target * (1 - ROUNDING) if pruned < self.target else 1.0

    def refinement(self, u: float, v: float, pruned: float) -> Refinement:
        """Return the arm of a point.

        ``relative``: ``p_t = min(p_{t-1} + u Delta_max, p*)`` and ``r = round(r_min (r_max /
        r_min)^v)``, so that every doubling of the rank has equal probability. ``absolute``: ``p_t =
        u p*`` and ``r = round(r_min + v (r_max - r_min))``.
        """
        low = self.lowest_rank
        high = self.highest_rank
        if self.kind == "relative":
            ratio = pruned + u * self.largest_step
            rank = low * (high / low) ** v
        else:
            ratio = u * self.target
            rank = low + v * (high - low)
        # A device never gets groups back, and never exceeds the target.
        return Refinement(max(pruned, min(ratio, self.target)), min(max(round(rank), low), high))


def step_for(target: float, rounds: int) -> float:
    """Return Delta_max so that a device reaches its target in ``rounds`` rounds, ``2 p* / T``.

    The device is assumed to draw u = 1/2 in each round.
    """
    return min(1.0, 2 * target / rounds) if target else 1.0
