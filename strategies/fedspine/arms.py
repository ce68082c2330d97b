"""Arms of FedSpine's bandit: the pruning ratio and LoRA rank of a point (section 4.1.2).

The paper's arm space is ``[p_{t-1}, p*] x [r_min, r_max]``. After a round, all played points lie at
or below ``p_{t-1}`` and cannot be played again, so the paper's bandit starts anew in every round;
this is ``absolute``. With ``relative`` a point gives the next pruning step, so it has the same
meaning in every round.
"""

import sys
from dataclasses import dataclass
from typing import Literal

from espalier.errors import InputError

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
    """Pruning ratios and ranks of one device.

    Raises
    ------
    InputError
        A bound is out of range.
    """

    target: float
    """Target pruning ratio p*, in [0, 1)."""
    largest_step: float
    """Maximum step Delta_max of ``relative``, in (0, 1]; see ``step_for``."""
    lowest_rank: int
    highest_rank: int
    kind: Kind = "relative"

    def __post_init__(self) -> None:
        if not 0 <= self.target < 1:
            raise InputError(f"target = {self.target}: a share to prune is at least 0 and below 1")
        if not 0 < self.largest_step <= 1:
            raise InputError(f"largest step = {self.largest_step}: has to be above 0 and at most 1")
        if not 1 <= self.lowest_rank <= self.highest_rank:
            raise InputError(
                f"ranks from {self.lowest_rank} to {self.highest_rank}: at least 1, and the lowest"
                " not above the highest"
            )
        if self.kind not in ("relative", "absolute"):
            raise InputError(f"arm space = {self.kind!r}: choose relative or absolute")

    def least(self, pruned: float) -> float:
        """Return the u below which no arm can be played, for ``Bandit.draw``.

        ``pruned`` is the device's present pruning ratio. With ``absolute``, the result is never
        above the u that led to this ratio, despite rounding.
        """
        if self.kind == "relative":
            return 0.0
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
            wanted = pruned + u * self.largest_step
            rank = low * (high / low) ** v
        else:
            wanted = u * self.target
            rank = low + v * (high - low)
        return Refinement(max(pruned, min(wanted, self.target)), min(max(round(rank), low), high))


def step_for(target: float, rounds: int) -> float:
    """Return Delta_max so that a device reaches its target in ``rounds`` rounds, ``2 p* / T``.

    The device is assumed to draw u = 1/2 in each round.

    Raises
    ------
    InputError
        ``rounds`` is below 1.
    """
    if rounds < 1:
        raise InputError(f"rounds of pruning = {rounds}: has to be at least 1")
    return min(1.0, 2 * target / rounds) if target else 1.0
