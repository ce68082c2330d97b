"""How much goes of each kind in each block, where units of several kinds or blocks compete and nobody knows which will go.

A share is one of parameters, while what travels is adapters. A unit costs so many parameters and has so many numbers of
adapters on it, as all of its kind in its block have; so the cuts that leave adapters largest and smallest are those of a
knapsack that takes fractions of units.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from espalier.settings.federation import Payload
from espalier.settings.fedspine import FedSpineSettings
from espalier.training.unit_importance import kind_of
from espalier.wire.adapters import AdapterPlan
from espalier.wire.cut_units import Cut, CutUnits
from espalier.wire.cuts import KINDS
from espalier.wire.structure import unit_size
from server_app.planning.messages.base import Case

BYTES: dict[Payload, float] = {"float32": 4, "bfloat16": 2, "nf4": 0.5625}
"""Of a number."""
AROUND_TENSOR = 32
"""Bytes by which blobs differ for each tensor though they have as many numbers: digits of a header, and NF4's last block."""


@dataclass(frozen=True)
class Pool:
    """Units of one kind in one block."""

    number: int
    """As in ``CutUnits.pools``."""
    units: int
    """How many there are."""
    can_go: int
    cost: int
    """Parameters of each."""
    numbers: int
    """Numbers of adapters on each, for every rank."""


@dataclass(frozen=True)
class UnevenCuts:
    """Cuts of a run.

    Parameters
    ----------
    adapters : of the whole model
    rank : the lowest that adapters have
    around_parts : bytes by which messages may differ that have as many numbers, because they are in more parts or fewer
    """

    units: CutUnits
    job: FedSpineSettings
    adapters: AdapterPlan
    payload: Payload
    rank: int
    around_parts: int = 0

    def cut(self, share: float, case: Case) -> Cut:
        """The cut of a share with which the fewest bytes travel, or the most; both are bounds, which no device may have.

        ``usual`` takes the share of each kind in each block, as far as units allow. It matters how many units of each go
        here, not which.
        """
        pools = self._pools()
        found = self.units.none
        targets = self.units.targets(share, self.job)
        for own, least in targets:
            competing = [pools[number] for number in np.unique(self.units.pools[own]).tolist()]
            room = self.units.room(own, self.job)
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
                found[np.flatnonzero(self.units.pools == pool.number)[pool.units - gone :]] = True
        return found

    def _around(self, pools: Sequence[Pool], sets: int) -> int:
        """Numbers of the lowest rank that weigh as much as all in which blobs and messages may differ beside their numbers."""
        tensors = sum(
            1 + 2 * len(self.adapters.blocks.get(block, ()))
            for block in {pool.number // 2 for pool in pools}
        )
        return math.ceil(
            (AROUND_TENSOR * tensors + self.around_parts / sets) / (BYTES[self.payload] * self.rank)
        )

    def _pools(self) -> list[Pool]:
        numbers, first, counts = np.unique(self.units.pools, return_index=True, return_counts=True)
        on = [0] * len(numbers)
        for index, adapter in self.adapters:
            kind, _ = kind_of(adapter.linear.name)
            on[2 * index + KINDS.index(kind)] += unit_size(
                self.units.plan, adapter.linear.name, kind
            )
        return [
            Pool(number, count, count - least, int(self.units.costs[place]), own)
            for number, place, count, least, own in zip(
                numbers.tolist(),
                first,
                counts.tolist(),
                self.units.must_stay(self.job),
                on,
                strict=True,
            )
        ]


def _ordered(pools: Sequence[Pool], *, fewest: bool) -> list[int]:
    """Places of pools, in the order in which the fewest numbers go with parameters, or the most."""
    return sorted(
        range(len(pools)),
        key=lambda place: (pools[place].numbers / pools[place].cost, place),
        reverse=not fewest,
    )


def _numbers(pools: Sequence[Pool], amount: int, *, fewest: bool) -> int:
    """The fewest numbers that go with so many parameters, or the most, if units could be split."""
    left = float(amount)
    found = 0.0
    for pool in (pools[place] for place in _ordered(pools, fewest=fewest)):
        gone = min(pool.can_go, left / pool.cost)
        left -= gone * pool.cost
        found += gone * pool.numbers
    return math.floor(found) if fewest else math.ceil(found)


def _in_turn(pools: Sequence[Pool], numbers: int, *, fewest: bool) -> list[int]:
    """Of each pool how many units go, one pool after the other, so that no more than these numbers do, or no fewer."""
    counts = [0] * len(pools)
    for place in _ordered(pools, fewest=fewest):
        pool = pools[place]
        whole = numbers // pool.numbers if fewest else -(-numbers // pool.numbers)
        counts[place] = max(0, min(pool.can_go, whole))
        numbers -= counts[place] * pool.numbers
    return counts


def _spread(pools: Sequence[Pool], amount: int, multiple: int) -> list[int]:
    """The same of all pools alike, until so many parameters have gone; of channels so that a multiple stays."""
    counts = [0] * len(pools)
    left = amount
    for kind in range(len(KINDS)):  # groups, which are few and large, then channels
        part = left / sum(pool.units * pool.cost for pool in pools if pool.number % 2 >= kind)
        for place, pool in enumerate(pools):
            if pool.number % 2 == kind:
                counts[place] = min(pool.can_go, int(pool.units * part))
        left = amount - sum(count * pool.cost for count, pool in zip(counts, pools, strict=True))
    # What is left of units that do not go in part.
    for place, pool in sorted(enumerate(pools), key=lambda one: one[1].cost):
        more = max(0, min(pool.can_go - counts[place], -(-left // pool.cost)))
        counts[place] += more
        left -= more * pool.cost
    for place, pool in enumerate(pools):
        if counts[place] and KINDS[pool.number % 2] == "channels":
            counts[place] = min(
                pool.can_go, counts[place] + (pool.units - counts[place]) % multiple
            )
    return counts
