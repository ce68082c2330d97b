"""What a point of the bandit's square means: a pruning ratio and a LoRA rank (FedSpine section 4.1.2).

The paper's arm space is ``[p_{t-1}, p*] x [r_min, r_max]``. After a round all that was played lies at or below ``p_{t-1}``,
outside of what can still be played, so its bandit starts again with every round; that is ``absolute`` here. With ``relative``
a point says how much further to prune, and the same point means the same in every round.
"""

import sys
from dataclasses import dataclass
from typing import Literal

from espalier.settings.mistakes import Mistake

Kind = Literal["relative", "absolute"]
ROUNDING = 4 * sys.float_info.epsilon
"""More than a product and a quotient of floats can be off together."""


@dataclass(frozen=True)
class Refinement:
    """What a device is asked for in a round."""

    pruned: float
    """p_t: share of the prunable parameters that is gone after this round's cut, never less than before."""
    rank: int
    """r_t of its LoRA adapters."""


@dataclass(frozen=True)
class ArmSpace:
    """Pruning ratios and ranks of one device.

    Raises
    ------
    Mistake
        A bound is out of range.
    """

    target: float
    """p*, in [0, 1)."""
    largest_step: float
    """Delta_max of ``relative``, above 0 and at most 1: see ``step_for``."""
    lowest_rank: int
    highest_rank: int
    kind: Kind = "relative"

    def __post_init__(self) -> None:
        if not 0 <= self.target < 1:
            raise Mistake(f"target = {self.target}: a share to prune is at least 0 and below 1")
        if not 0 < self.largest_step <= 1:
            raise Mistake(f"largest step = {self.largest_step}: has to be above 0 and at most 1")
        if not 1 <= self.lowest_rank <= self.highest_rank:
            raise Mistake(
                f"ranks from {self.lowest_rank} to {self.highest_rank}: at least 1, and the lowest"
                " not above the highest"
            )
        if self.kind not in ("relative", "absolute"):
            raise Mistake(f"arm space = {self.kind!r}: choose relative or absolute")

    def least(self, pruned: float) -> float:
        """Below which u no arm can be played any more, for ``Bandit.draw``, of a device of which so much is pruned.

        Of ``absolute`` never above the u that was drawn and led there, whatever product and quotient are rounded to.
        """
        if self.kind == "relative":
            return 0.0
        return pruned / self.target * (1 - ROUNDING) if pruned < self.target else 1.0

    def refinement(self, u: float, v: float, pruned: float) -> Refinement:
        """The arm at a point.

        ``relative``: ``p_t = min(p_{t-1} + u Delta_max, p*)`` and ``r = round(r_min (r_max / r_min)^v)``, which gives every
        doubling of the rank the same room. ``absolute``: ``p_t = u p*`` and ``r = round(r_min + v (r_max - r_min))``.
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
    """Delta_max with which a device that always draws the middle reaches its target in so many rounds, ``2 p* / T``.

    Raises
    ------
    Mistake
        There is no round.
    """
    if rounds < 1:
        raise Mistake(f"rounds of pruning = {rounds}: has to be at least 1")
    return min(1.0, 2 * target / rounds) if target else 1.0
