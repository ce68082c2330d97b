"""Prunable groups of a model in one sequence, and the cut: which of them are removed.

A prunable group is an attention group or an FFN channel. The sequence contains, for each block, its
attention groups and then its channels. The groups of one kind in one block are a pool; they cost
the same, and one of them always stays.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from espalier.errors import InputError
from espalier.models.plan import ModelPlan
from espalier.models.structure import GROUP_KINDS, Structure, group_costs, sizes_of
from espalier.settings.pruning import CutSettings

Cut = NDArray[np.bool_]
"""Array of shape (groups,): True for prunable groups that are removed; ordered as ``Groups``."""


@dataclass(frozen=True, eq=False)
class Groups:
    """Prunable groups of a model: their number, their cost, and which of them compete."""

    plan: ModelPlan
    counts: NDArray[np.int64]
    """Number of groups of each pool, (pools,).

    The number of a pool is twice its block's number, plus 1 for channels.
    """
    pool_costs: NDArray[np.int64]
    """Number of parameters of one group of each pool, (pools,)."""
    blocks: range
    """Numbers of the blocks whose groups may be removed."""

    @staticmethod
    @lru_cache(maxsize=4)
    def of(plan: ModelPlan, blocks: range | None = None) -> "Groups":
        """Return the prunable groups of a model; by default all blocks may lose groups."""
        counts = [
            getattr(sizes_of(plan, block), kind) for block in plan.blocks for kind in GROUP_KINDS
        ]
        costs = [cost for block in plan.blocks for cost in group_costs(plan, block)]
        return Groups(
            plan,
            np.array(counts, np.int64),
            np.array(costs, np.int64),
            range(len(plan.blocks)) if blocks is None else blocks,
        )

    @cached_property
    def costs(self) -> NDArray[np.int64]:
        """Number of parameters of each group, (groups,)."""
        return np.repeat(self.pool_costs, self.counts)

    @cached_property
    def pools(self) -> NDArray[np.int64]:
        """Number of the pool of each group, (groups,)."""
        return np.repeat(np.arange(len(self.counts)), self.counts)

    @cached_property
    def removable(self) -> NDArray[np.bool_]:
        """True for groups that may be removed, (groups,); heads of some families may not."""
        return self.plan.heads_prunable | (self.pools % 2 == 1)

    @cached_property
    def _starts(self) -> list[int]:
        return [0, *np.cumsum(self.counts).tolist()]

    def at(self, index: int, kind: str) -> slice:
        """Return the place of a block's groups of one kind in the sequence."""
        pool = 2 * index + GROUP_KINDS.index(kind)
        return self.span(range(pool, pool + 1))

    def span(self, pools: range) -> slice:
        """Return the place of the groups of adjacent pools in the sequence."""
        return slice(self._starts[pools.start], self._starts[pools.stop])

    # ----- cut -----

    @property
    def none(self) -> Cut:
        """Cut that removes nothing."""
        return np.zeros(self._starts[-1], np.bool_)

    def stay(self, cut: Cut) -> NDArray[np.int64]:
        """Return the number of remaining groups of each pool, (pools,)."""
        return np.bincount(self.pools[~cut], minlength=len(self.counts))

    def ratio(self, cut: Cut) -> float:
        """Return the fraction of the parameters of all prunable groups that is cut."""
        return float(self.costs[cut].sum() / self.costs.sum())

    def structure(self, cut: Cut, biases: Sequence[str] = ()) -> Structure:
        """Return the structure of the model that remains.

        Parameters
        ----------
        biases : canonical names of the matrices that get a bias
        """
        kept = {
            block.index: {
                kind: np.flatnonzero(~cut[self.at(block.index, kind)]).tolist()
                for kind in GROUP_KINDS
            }
            for block in self.plan.blocks
        }
        return replace(Structure.whole(self.plan).keeping(kept), added_biases=tuple(biases))

    # ----- pruning ratio -----

    def competitions(self, selection: str) -> list[range]:
        """Return the pools of each set of groups that compete with each other.

        The setting ``selection`` determines whether groups of the whole model, of a block, or of a
        kind in a block compete.
        """
        pools = range(2 * self.blocks.start, 2 * self.blocks.stop)
        # A block has two pools, so adjacent pools compete.
        length = {"block": 2, "kind": 1}.get(selection, len(pools))
        if selection == "kind" and not self.plan.heads_prunable:
            return [pools[first : first + 1] for first in range(1, len(pools), 2)]
        return [pools[first : first + length] for first in range(0, len(pools), length)]

    def targets(self, ratio: float, selection: str) -> list[tuple[range, int]]:
        """Return the pools of each competition, and the number of its parameters to cut."""
        return [
            (pools, to_remove(self._total(pools), ratio)) for pools in self.competitions(selection)
        ]

    def wanted(self, job: CutSettings) -> float:
        """Return the requested pruning ratio as a fraction of the groups that may be removed."""
        return (
            # The ratio is of all groups; what is returned is of those that may be removed.
            job.pruning_ratio * int(self.costs.sum()) / self._total(self.competitions("global")[0])
        )

    def reaches(self, cut: Cut, ratio: float, job: CutSettings) -> bool:
        """Return True if each competition has this pruning ratio or nothing left to cut."""
        can_cut = self.stay(cut) > self.must_stay(job)
        return all(
            self.spent(cut, pools) >= target or not can_cut[_slice(pools)].any()
            for pools, target in self.targets(ratio, job.selection)
        )

    def spent(self, cut: Cut, pools: range) -> int:
        """Return the number of parameters of the cut groups of some pools."""
        span = self.span(pools)
        return int(self.costs[span][cut[span]].sum())

    def must_stay(self, job: CutSettings) -> NDArray[np.int64]:
        """Return the minimum number of groups that stay in each pool, (pools,).

        One attention group stays, or all if heads cannot be removed. Of the channels
        ``channel_multiple`` stay, or all if there are fewer.
        """
        # Odd pools are those of channels.
        minimum = np.ones_like(self.counts)
        minimum[1::2] = job.channel_multiple
        if not self.plan.heads_prunable:
            minimum[::2] = self.counts[::2]
        return np.minimum(minimum, self.counts)

    def room(self, pools: range, job: CutSettings) -> int:
        """Return the number of parameters by which a multiple of channels may miss the target."""
        # Up to one channel less than a multiple per pool.
        channels = self.pool_costs[_slice(pools)][[pool % 2 == 1 for pool in pools]]
        return (job.channel_multiple - 1) * int(channels.sum())

    def reachable(self, job: CutSettings) -> float:
        """Return ``wanted``, and refuse it if it cannot be reached.

        Raises InputError if too many parameters would have to be removed: one attention group and
        one multiple of channels stay in each block.
        """
        ratio = self.wanted(job)
        for pools, target in self.targets(ratio, job.selection):
            total = self._total(pools)
            num_kept = int((self.pool_costs * self.must_stay(job))[_slice(pools)].sum())
            if target > total - num_kept:
                multiple = job.channel_multiple
                channels = (
                    f"{multiple} channels (channel-multiple)" if multiple > 1 else "one channel"
                )
                remedies = {
                    "lower it": num_kept < total,
                    "lower channel-multiple": multiple > 1,
                    "set pruning.selection to global": job.selection != "global",
                }
                remedy = " or ".join(text for text, applies in remedies.items() if applies)
                raise InputError(
                    f"pruning.ratio = {job.pruning_ratio:g}: {ratio:.1%} of what can be removed"
                    f" would be removed, but {num_kept} of {total} parameters must stay,"
                    f" {'one group' if self.plan.heads_prunable else 'attention'} and"
                    f" {channels} of each block;"
                    f" {remedy or 'some blocks have no removable groups, whatever the ratio'}"
                )
        return ratio

    def _total(self, pools: range) -> int:
        return int(self.costs[self.span(pools)].sum())


def to_remove(total: int, ratio: float) -> int:
    """Return the number of parameters that a pruning ratio of a total means, rounded up.

    Float rounding above a whole number is ignored.
    """
    return math.ceil(total * ratio * (1 - 1e-12))


def _slice(pools: range) -> slice:
    return slice(pools.start, pools.stop)
