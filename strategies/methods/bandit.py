"""S-UCB: a bandit whose arms are the points of a square, one per device (FedSpine section 4.1.2, algorithm 1).

The square is cut into cells, the leaves of the paper's tree. In each round the cell with the largest upper confidence bound is
chosen, a point is drawn in it, and the cell is cut at that point while it is larger than ``granularity``. Rewards of earlier
rounds count less. Nothing here knows what a point or a reward means: ``refining_arms.py`` and ``refining_reward.py`` do.

Where this differs from the paper. Line 4 of algorithm 1 lacks the argmax, and line 9 is blank: the partition stays. Cells are
half-open, so that a point on a cut is in one cell alone. ``log n_t`` in equation 5 is negative for ``n_t < 1``, as it is in
round 2, so it is ``log(1 + n_t)`` here; its factor is ``exploration``, 2 in the paper. A cell without a point has no mean: it
comes before all others, and chance decides between several.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from espalier.settings.mistakes import Mistake
from espalier.settings.seeds import derive_seed

PURPOSE = "bandit"
"""Of the seeds that decisions are drawn with."""
SMALLEST_PART = 0.25
"""Of ``granularity``: no cut leaves a thinner cell."""


@dataclass(frozen=True)
class Cell:
    """The points (u, v) with ``left <= u < right`` and ``low <= v < high``."""

    left: float
    right: float
    low: float
    high: float

    def holds(self, u: float, v: float) -> bool:
        """Whether the point lies in it."""
        return self.left <= u < self.right and self.low <= v < self.high

    @property
    def diameter(self) -> float:
        """Length of its diagonal; the paper does not say which diameter it means."""
        return math.hypot(self.right - self.left, self.high - self.low)

    def cut_at(self, u: float, v: float, thinnest: float) -> tuple["Cell", ...]:
        """The cells that vertical and horizontal cuts through a point make: 4, or fewer where a part would be thinner."""
        columns = _cut(self.left, u, self.right, thinnest)
        rows = _cut(self.low, v, self.high, thinnest)
        return tuple(Cell(*column, *row) for column in columns for row in rows)


WHOLE = Cell(0.0, 1.0, 0.0, 1.0)


@dataclass(frozen=True)
class Pull:
    """A point that was played, and what it brought."""

    u: float
    v: float
    reward: float
    round: int


@dataclass(frozen=True)
class Exploration:
    """Parameters of S-UCB, of which the paper names but the 2 of equation 5.

    The defaults are for rewards from 0 to 1 and some hundred rounds. With the paper's 2 such a bandit does hardly better than
    arms drawn at random, as the bound is far above any reward; and a small granularity makes more cells than there are rounds
    to see each of them twice (``python -m benchmarks.fedspine regret``).

    Raises
    ------
    Mistake
        One is out of range.
    """

    discount: float = 0.98
    """lambda of equation 4, above 0 and at most 1: a reward of k rounds ago counts with its k-th power."""
    granularity: float = 0.4
    """delta of algorithm 1, above 0: a cell with a smaller diameter, or this one, is not cut."""
    exploration: float = 0.01
    """xi, at least 0, in place of the 2 of equation 5."""

    def __post_init__(self) -> None:
        if not 0 < self.discount <= 1:
            raise Mistake(f"discount = {self.discount}: has to be above 0 and at most 1")
        if not (self.granularity > 0 and math.isfinite(self.granularity)):
            raise Mistake(
                f"granularity = {self.granularity}: has to be a finite number above 0; 2 cuts"
                " nothing"
            )
        if not (self.exploration >= 0 and math.isfinite(self.exploration)):
            raise Mistake(
                f"exploration = {self.exploration}: has to be a finite number of at least 0"
            )


@dataclass(frozen=True)
class Bandit:
    """What one device's bandit knows; a value, so that a checkpoint may hold it."""

    how: Exploration
    cells: tuple[Cell, ...] = (WHOLE,)
    """They tile the square."""
    history: tuple[Pull, ...] = ()
    """Ascending by round."""

    def draw(
        self, seed: int, device: int, server_round: int, least: float = 0.0
    ) -> tuple[float, float]:
        """Decide which point to play.

        Parameters
        ----------
        seed : of the run; with device and round it decides alone what is drawn
        server_round : later than all that were learned
        least : in [0, 1]: points below this u can no longer be played (the paper's arm space), and cells are cut off there; at
            1 the right-most cells are whole again, as u then means nothing any more

        Returns
        -------
        tuple
            (u, v) in [0, 1) x [0, 1)

        Raises
        ------
        ValueError
            The round is none that comes next, or ``least`` is not in [0, 1].
        """
        self._require_later(server_round)
        if not 0 <= least <= 1:
            raise ValueError(f"least has to lie in [0, 1], got {least}")
        cells = self._playable(least)
        bounds = self.bounds(cells, server_round)
        largest = max(bounds)
        generator = np.random.default_rng(
            derive_seed(seed, PURPOSE, client=device, server_round=server_round)
        )
        best = [cell for cell, bound in zip(cells, bounds, strict=True) if bound == largest]
        chosen = best[int(generator.integers(len(best)))]
        return _within(chosen.left, chosen.right, generator.random()), _within(
            chosen.low, chosen.high, generator.random()
        )

    def learn(self, u: float, v: float, reward: float, server_round: int) -> "Bandit":
        """The same bandit after a point was played; a device that gave no answer teaches nothing, and is not learned from.

        Raises
        ------
        ValueError
            The point is not in the square, the reward is not finite, or the round is none that comes next.
        """
        self._require_later(server_round)
        if not WHOLE.holds(u, v):
            raise ValueError(f"a point of the square has both coordinates in [0, 1), got {u}, {v}")
        if not math.isfinite(reward):
            raise ValueError(f"a reward has to be a finite number, got {reward}")
        (place,) = (place for place, cell in enumerate(self.cells) if cell.holds(u, v))
        cells = self.cells
        cell = self.cells[place]
        if cell.diameter > self.how.granularity:
            parts = cell.cut_at(u, v, SMALLEST_PART * self.how.granularity)
            cells = (*cells[:place], *parts, *cells[place + 1 :])
        return replace(
            self, cells=cells, history=(*self.history, Pull(u, v, float(reward), server_round))
        )

    def bounds(self, cells: Sequence[Cell], server_round: int) -> list[float]:
        """U_t of each cell (equations 4 to 6): infinite where no point lies in it, or where all are long forgotten."""
        edges = np.array([(cell.left, cell.right, cell.low, cell.high) for cell in cells]).T[
            :, :, None
        ]
        points = (
            np.array([(pull.u, pull.v, pull.reward, pull.round) for pull in self.history])
            .reshape(-1, 4)
            .T
        )
        inside = (
            (edges[0] <= points[0])
            & (points[0] < edges[1])
            & (edges[2] <= points[1])
            & (points[1] < edges[3])
        )
        counted = self.how.discount ** (server_round - points[3])
        counts = np.where(inside, counted, 0).sum(axis=1)
        sums = np.where(inside, counted * points[2], 0).sum(axis=1)
        spread = self.how.exploration * math.log1p(float(counts.sum()))
        return [
            math.inf if count == 0 else float(total / count) + math.sqrt(spread / count)
            for count, total in zip(counts.tolist(), sums.tolist(), strict=True)
        ]

    def _playable(self, least: float) -> list[Cell]:
        if least >= 1:
            return [cell for cell in self.cells if cell.right == 1]
        return [
            replace(cell, left=max(cell.left, least)) for cell in self.cells if cell.right > least
        ]

    def _require_later(self, server_round: int) -> None:
        if self.history and server_round <= self.history[-1].round:
            raise ValueError(
                f"round {server_round} does not come after round {self.history[-1].round}, which"
                " was learned"
            )

    # ----- as text ----------------------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """JSON values; floats survive, as JSON writes them with all their digits."""
        return {
            "discount": self.how.discount,
            "granularity": self.how.granularity,
            "exploration": self.how.exploration,
            "cells": [[cell.left, cell.right, cell.low, cell.high] for cell in self.cells],
            "history": [[pull.u, pull.v, pull.reward, pull.round] for pull in self.history],
        }

    @staticmethod
    def from_json(document: Any) -> "Bandit":
        """Read what ``to_json`` returned.

        Raises
        ------
        Mistake
            It is something else: cells that do not tile the square, or rounds or rewards that cannot be.
        """
        try:
            how = Exploration(
                *(float(document[key]) for key in ("discount", "granularity", "exploration"))
            )
            cells = tuple(Cell(*map(float, edges)) for edges in document["cells"])
            history = tuple(
                Pull(float(u), float(v), float(reward), int(at))
                for u, v, reward, at in document["history"]
            )
        except (KeyError, TypeError, ValueError):
            raise Mistake(
                "a bandit of the checkpoint is damaged; resume from another run directory"
            ) from None
        rounds_rise = all(earlier.round < later.round for earlier, later in pairwise(history))
        lie_once = all(sum(cell.holds(pull.u, pull.v) for cell in cells) == 1 for pull in history)
        if not (
            tile(cells)
            and rounds_rise
            and lie_once
            and all(math.isfinite(pull.reward) for pull in history)
        ):
            raise Mistake(
                "a bandit of the checkpoint has impossible cells or points; resume from another run"
                " directory"
            )
        return Bandit(how, cells, history)


def tile(cells: Sequence[Cell]) -> bool:
    """Whether every point of the square lies in exactly one cell, by the cells' corners."""
    if not all(
        0 <= cell.left < cell.right <= 1 and 0 <= cell.low < cell.high <= 1 for cell in cells
    ):
        return False
    us = sorted({edge for cell in cells for edge in (cell.left, cell.right)})
    vs = sorted({edge for cell in cells for edge in (cell.low, cell.high)})
    if not cells or (us[0], us[-1], vs[0], vs[-1]) != (0, 1, 0, 1):
        return False
    covered = np.zeros((len(us), len(vs)), dtype=np.int64)
    for cell in cells:
        covered[
            us.index(cell.left) : us.index(cell.right), vs.index(cell.low) : vs.index(cell.high)
        ] += 1
    return bool((covered[:-1, :-1] == 1).all())


def _cut(start: float, at: float, end: float, thinnest: float) -> tuple[tuple[float, float], ...]:
    if min(at - start, end - at) < thinnest:
        return ((start, end),)
    return (start, at), (at, end)


def _within(start: float, end: float, share: float) -> float:
    """A point of [start, end); rounding does not carry it to the end."""
    return min(start + (end - start) * share, math.nextafter(end, start))
