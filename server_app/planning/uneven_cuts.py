"""The cuts that leave adapters largest and smallest, where units of several kinds or blocks compete and nobody knows which go.

A share is one of parameters, while what travels is adapters. A unit costs so many parameters and has so many numbers of
adapters on it, as all of its kind in its block have; so the bounds are those of a knapsack that takes fractions of units.
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

BYTES: dict[Payload, float] = {"float32": 4, "bfloat16": 2, "nf4": 0.5625}
"""Of a number."""
UNEVEN = 32
"""Bytes by which tensors with as many numbers in all may differ, each: digits in a blob's header, and NF4's last block."""


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
    """Bounds of the cuts of a run.

    Parameters
    ----------
    adapters : of the whole model
    rank : the lowest that adapters have
    """

    units: CutUnits
    job: FedSpineSettings
    adapters: AdapterPlan
    payload: Payload
    rank: int

    def cut(self, share: float, *, largest: bool) -> Cut:
        """The cut of a share with the largest adapters, or with the smallest; a bound, which no device may have.

        It says how many units of each kind go in each block, not which.
        """
        pools, found = self._pools(), self.units.none
        for own, least in self.units.targets(share, self.job):
            competing = [pools[number] for number in np.unique(self.units.pools[own]).tolist()]
            room, blocks = self.units.room(own, self.job), {pool.number // 2 for pool in competing}
            amount = max(0, least - room) if largest else least + room + max(pool.cost for pool in competing)
            numbers = _numbers(competing, amount, largest=largest)
            differ = math.ceil(sum(self._differ(block) for block in blocks) / (BYTES[self.payload] * self.rank))
            wanted = numbers - differ if largest else numbers + differ
            for pool, gone in _counts(competing, wanted, largest=largest):
                found[np.flatnonzero(self.units.pools == pool.number)[pool.units - gone :]] = True
        return found

    def _differ(self, block: int) -> int:
        """Bytes by which a block's blobs may differ that have as many numbers."""
        return UNEVEN * (1 + 2 * len(self.adapters.blocks.get(block, ())))

    def _pools(self) -> list[Pool]:
        numbers, first, counts = np.unique(self.units.pools, return_index=True, return_counts=True)
        on = [0] * len(numbers)
        for index, adapter in self.adapters:
            kind, _ = kind_of(adapter.linear.name)
            on[2 * index + KINDS.index(kind)] += unit_size(self.units.plan, adapter.linear.name, kind)
        stay = [least for _, channels in self.units.numbers for least in (1, min(self.job.channel_multiple, channels))]
        return [
            Pool(number, count, count - least, int(self.units.costs[place]), own)
            for number, place, count, least, own in zip(numbers.tolist(), first, counts.tolist(), stay, on, strict=True)
        ]


def _in_turn(pools: Sequence[Pool], *, largest: bool) -> list[Pool]:
    """Those with the fewest numbers to a parameter first where adapters are to stay large, else those with the most."""
    return sorted(pools, key=lambda pool: (pool.numbers / pool.cost, pool.number), reverse=not largest)


def _numbers(pools: Sequence[Pool], amount: int, *, largest: bool) -> int:
    """Numbers that go at least, or at most, with so many parameters, where units could be split."""
    left, found = float(amount), 0.0
    for pool in _in_turn(pools, largest=largest):
        gone = min(pool.can_go, left / pool.cost)
        left -= gone * pool.cost
        found += gone * pool.numbers
    return math.floor(found) if largest else math.ceil(found)


def _counts(pools: Sequence[Pool], numbers: int, *, largest: bool) -> list[tuple[Pool, int]]:
    """Of each pool how many units go, so that no more than these numbers do, or no fewer."""
    found = []
    for pool in _in_turn(pools, largest=largest):
        whole = numbers // pool.numbers if largest else -(-numbers // pool.numbers)
        gone = max(0, min(pool.can_go, whole))
        numbers -= gone * pool.numbers
        found.append((pool, gone))
    return found
