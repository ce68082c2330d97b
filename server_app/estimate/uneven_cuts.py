"""Bounds on FedSpine's cuts if it is unknown which kinds of groups, in which blocks, will be cut.

The pruning ratio counts parameters, but messages contain adapters. All groups of one kind in one
block have the same number of parameters and the same number of adapter values. The cuts with the
largest and the smallest remaining adapters are therefore solutions of a fractional knapsack
problem.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from espalier.methods.fedspine import FedSpineSettings
from espalier.models.adapters import AdapterPlan
from espalier.models.groups import Cut, Groups
from espalier.models.structure import GROUP_KINDS, group_size, kind_of
from espalier.settings.federation import WireDtype
from server_app.estimate.dry_runs.dry_run import Case

BYTES: dict[WireDtype, float] = {"float32": 4, "bfloat16": 2, "nf4": 0.5625}
"""Bytes per number on the wire."""
AROUND_TENSOR = 32
"""Bytes per tensor by which blobs with equally many numbers may differ.

The difference comes from digits in the header and from the last block of NF4.
"""


@dataclass(frozen=True)
class Pool:
    """Prunable groups of one kind in one block."""

    number: int
    """Number of the pool, as in ``Groups.pools``."""
    count: int
    """Number of groups in the pool."""
    can_go: int
    cost: int
    """Parameters of each group."""
    numbers: int
    """Adapter values of each group, per rank."""


@dataclass(frozen=True)
class UnevenCuts:
    """Cuts of a run.

    Parameters
    ----------
    adapters : adapters of the whole model
    rank : lowest rank of adapters
    around_parts : bytes by which messages with equally many numbers may differ, because they have
        more or fewer parts
    """

    groups: Groups
    job: FedSpineSettings
    adapters: AdapterPlan
    wire_dtype: WireDtype
    rank: int
    around_parts: int = 0

    def cut(self, share: float, case: Case) -> Cut:
        """Return a cut with this pruning ratio and the fewest or the most bytes in messages.

        Both are bounds that no device may reach. ``usual`` cuts the same fraction of each kind in
        each block, as far as whole groups allow. Only the number of cut groups in each pool matters
        here, not which ones.
        """
        pools = self._pools()
        found = self.groups.none
        targets = self.groups.targets(share, self.job.selection)
        for own, least in targets:
            competing = [pools[number] for number in own]
            room = self.groups.room(own, self.job)
            around = self._around(competing, len(targets))
            fewest = _numbers(competing, max(0, least - room), fewest=True) - around
            most = (
                _numbers(
                    competing, least + room + max(pool.cost for pool in competing), fewest=False
                )
                + around
            )
            if case == "usual":
                counts = _spread(competing, least, self.job.channel_multiple)
            else:
                counts = _in_turn(
                    competing, most if case == "least" else fewest, fewest=case == "most"
                )
            for pool, gone in zip(competing, counts, strict=True):
                own_groups = found[self.groups.span(range(pool.number, pool.number + 1))]
                own_groups[pool.count - gone :] = True
        return found

    def _around(self, pools: Sequence[Pool], sets: int) -> int:
        """Return the number of adapter values that corresponds to the uncertain bytes.

        These are the bytes by which blobs and messages with equally many numbers may differ. The
        result is for the lowest rank.
        """
        tensors = sum(
            1 + 2 * len(self.adapters.blocks.get(block, ()))
            for block in {pool.number // 2 for pool in pools}
        )
        return math.ceil(
            (AROUND_TENSOR * tensors + self.around_parts / sets)
            / (BYTES[self.wire_dtype] * self.rank)
        )

    def _pools(self) -> list[Pool]:
        counts = self.groups.counts.tolist()
        on = [0] * len(counts)
        for index, adapter in self.adapters:
            kind, _ = kind_of(adapter.linear.name)
            on[2 * index + GROUP_KINDS.index(kind)] += group_size(
                self.groups.plan, adapter.linear.name, kind
            )
        return [
            Pool(number, count, count - least, cost, own)
            for number, (count, least, cost, own) in enumerate(
                zip(
                    counts,
                    self.groups.must_stay(self.job).tolist(),
                    self.groups.pool_costs.tolist(),
                    on,
                    strict=True,
                )
            )
        ]


def _ordered(pools: Sequence[Pool], *, fewest: bool) -> list[int]:
    """Return the indices of pools, ordered by adapter values per parameter.

    The order begins with the fewest values if ``fewest``, else with the most.
    """
    return sorted(
        range(len(pools)),
        key=lambda place: (pools[place].numbers / pools[place].cost, place),
        reverse=not fewest,
    )


def _numbers(pools: Sequence[Pool], amount: int, *, fewest: bool) -> int:
    """Return the fewest or the most adapter values that are cut with ``amount`` parameters.

    Groups may be split here.
    """
    left = float(amount)
    found = 0.0
    for pool in (pools[place] for place in _ordered(pools, fewest=fewest)):
        gone = min(pool.can_go, left / pool.cost)
        left -= gone * pool.cost
        found += gone * pool.numbers
    return math.floor(found) if fewest else math.ceil(found)


def _in_turn(pools: Sequence[Pool], numbers: int, *, fewest: bool) -> list[int]:
    """Return the number of cut groups in each pool, filled pool by pool.

    At most ``numbers`` adapter values are cut if ``fewest``, else at least that many.
    """
    counts = [0] * len(pools)
    for place in _ordered(pools, fewest=fewest):
        pool = pools[place]
        whole = numbers // pool.numbers if fewest else -(-numbers // pool.numbers)
        counts[place] = max(0, min(pool.can_go, whole))
        numbers -= counts[place] * pool.numbers
    return counts


def _spread(pools: Sequence[Pool], amount: int, multiple: int) -> list[int]:
    """Return the number of cut groups in each pool, as the same fraction of each.

    ``amount`` is the number of parameters to cut. The number of remaining channels is a multiple of
    ``multiple``.
    """
    counts = [0] * len(pools)
    left = amount
    # Attention groups first, because they are few and large; channels then compensate for rounding.
    for kind in range(len(GROUP_KINDS)):
        part = left / sum(pool.count * pool.cost for pool in pools if pool.number % 2 >= kind)
        for place, pool in enumerate(pools):
            if pool.number % 2 == kind:
                counts[place] = min(pool.can_go, int(pool.count * part))
        left = amount - sum(count * pool.cost for count, pool in zip(counts, pools, strict=True))
    # Parameters that are still missing, because groups are only cut as a whole.
    for place, pool in sorted(enumerate(pools), key=lambda one: one[1].cost):
        more = max(0, min(pool.can_go - counts[place], -(-left // pool.cost)))
        counts[place] += more
        left -= more * pool.cost
    for place, pool in enumerate(pools):
        if counts[place] and GROUP_KINDS[pool.number % 2] == "channels":
            counts[place] = min(
                pool.can_go, counts[place] + (pool.count - counts[place]) % multiple
            )
    return counts
