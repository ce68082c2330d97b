"""Which groups and channels of a model are cut, one bit each: as they travel, and what may become of them in a round.

The units of all blocks lie side by side, of each block its groups, then its channels. The order is that of ``KINDS`` and of
``espalier.modeling.structured.units``. No unit comes back: what is cut stays cut.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from espalier.settings.mistakes import Mistake
from espalier.settings.structured import CutSettings
from espalier.wire.cuts import KINDS
from espalier.wire.payload import TensorSpec, pack_tensors, tensor_specs, views
from espalier.wire.plan import ModelPlan
from espalier.wire.structure import Structure, unit_costs, units_of
from pruning_kernels.bitmask import has_clean_padding, num_words, pack, unpack
from pruning_kernels.units import share_of

CUT = "units.cut"
"""Tensor name of the bits: 1 = cut."""

Cut = NDArray[np.bool_]
"""(units,): True for units that are cut."""


@dataclass(frozen=True, eq=False)
class CutUnits:
    """The units of a model: how many there are, what they cost, and which belong together."""

    plan: ModelPlan
    numbers: tuple[tuple[int, int], ...]
    """How many groups and channels each block has."""
    costs: NDArray[np.int64]
    """(units,): parameters of each."""
    pools: NDArray[np.int64]
    """(units,): twice the number of the block, plus 1 for channels."""

    @staticmethod
    @lru_cache(maxsize=4)
    def of(plan: ModelPlan) -> "CutUnits":
        """Those of a model."""
        numbers = []
        costs = list[int]()
        pools = list[int]()
        for block in plan.blocks:
            units = units_of(plan, block)
            numbers.append((units.groups, units.channels))
            for kind, (number, cost) in enumerate(
                zip(numbers[-1], unit_costs(plan, block), strict=True)
            ):
                costs += [cost] * number
                pools += [2 * block.index + kind] * number
        return CutUnits(plan, tuple(numbers), np.array(costs, np.int64), np.array(pools, np.int64))

    # ----- as bits ----------------------------------------------------------------------------------------------------

    @property
    def none(self) -> Cut:
        """Nothing is cut."""
        return np.zeros(len(self.costs), np.bool_)

    @property
    def specs(self) -> dict[str, TensorSpec]:
        """The tensors of a blob."""
        return {CUT: TensorSpec("U64", (num_words(len(self.costs)),))}

    def pack(self, cut: Cut) -> bytes:
        """The blob that says what is cut."""
        return pack_tensors({CUT: pack(cut)})

    def read(self, blob: bytes) -> Cut:
        """Read a blob.

        Raises
        ------
        Mistake
            It is something else, or nothing of some kind would stay in a block.
        """
        if tensor_specs(blob) != self.specs:
            raise Mistake(
                f"{CUT}: these are not the bits of this model's {len(self.costs)} groups and"
                " channels"
            )
        words = views(blob)[CUT]
        if not has_clean_padding(words, len(self.costs)):
            raise Mistake(f"{CUT}: bits are set beyond the last unit")
        cut = unpack(words, self.costs.shape)
        stay = np.bincount(self.pools[~cut], minlength=2 * len(self.numbers))
        if not stay.all():
            empty = int(np.flatnonzero(stay == 0)[0])
            raise Mistake(
                f"{CUT}: all {KINDS[empty % 2]} of block {empty // 2} are cut, one must stay"
            )
        return cut

    # ----- as a structure ---------------------------------------------------------------------------------------------

    def by_block(self, cut: Cut) -> list[dict[str, Cut]]:
        """The same for each block, by kind."""
        pieces = iter(
            np.split(cut, np.cumsum([number for own in self.numbers for number in own])[:-1])
        )
        return [{kind: next(pieces) for kind in KINDS} for _ in self.numbers]

    def side_by_side(self, cuts: Sequence[dict[str, Cut]]) -> Cut:
        """Invert ``by_block``."""
        return np.concatenate([own[kind] for own in cuts for kind in KINDS])

    def structure(self, cut: Cut) -> Structure:
        """What stays of the model."""
        kept = {
            index: {kind: np.flatnonzero(~units).tolist() for kind, units in own.items()}
            for index, own in enumerate(self.by_block(cut))
        }
        return Structure.whole(self.plan).keeping(kept)

    # ----- how much ---------------------------------------------------------------------------------------------------

    def share(self, cut: Cut) -> float:
        """What is cut, as a share of the parameters of all units."""
        return float(self.costs[cut].sum() / self.costs.sum())

    def wanted(self, job: CutSettings) -> float:
        """The share of these units' parameters that the settings ask for."""
        everything = int(self.costs.sum())
        return (
            job.share
            * (self.plan.num_parameters if job.share_of == "model" else everything)
            / everything
        )

    def reaches(self, cut: Cut, share: float, job: CutSettings) -> bool:
        """Whether so large a share is cut of all units that compete with each other, or all that can go."""
        stays = ~cut & self._can_go(cut, job)
        return all(
            int(self.costs[own & cut].sum()) >= least or not (own & stays).any()
            for own, least in self.targets(share, job)
        )

    def _can_go(self, cut: Cut, job: CutSettings) -> NDArray[np.bool_]:
        """Units of pools of which more stay than have to."""
        stay = np.bincount(self.pools[~cut], minlength=2 * len(self.numbers))
        return (stay > self.must_stay(job))[self.pools]

    def must_stay(self, job: CutSettings) -> list[int]:
        """How many units of each pool have to stay: one group, and the multiple of channels, or all if they are fewer."""
        return [
            least
            for _, channels in self.numbers
            for least in (1, min(job.channel_multiple, channels))
        ]

    def require_step(self, before: Cut, after: Cut, share: float, job: CutSettings) -> None:
        """Hold the cut of a round against what was asked for: that share, and less than a unit more.

        It may also be exactly as before: a client that lost what it measured cuts nothing. With ``channel-multiple`` the
        channels of each block come to a multiple, which moves the share by that many less one in each block at most.

        Raises
        ------
        Mistake
            Something came back, or too little or too much is cut.
        """
        if (before & ~after).any():
            raise Mistake(f"{CUT}: units that were cut before have come back")
        if np.array_equal(before, after):
            return
        for own, least in self.targets(share, job):
            spent = int(self.costs[own & after].sum())
            room = self.room(own, job)
            if spent < least - room:
                raise Mistake(f"{CUT}: less is cut than the share that was asked for")
            last = int(self.costs[own & after & ~before].max(initial=0))
            if last and spent - last >= least + room:
                raise Mistake(
                    f"{CUT}: more is cut than the share that was asked for, by a unit or more"
                )
        if uneven := [
            index
            for index, stay in enumerate(self._channels_left(after))
            if self._is_uneven(index, stay, job)
        ]:
            raise Mistake(
                f"{CUT}: the channels that stay in block {uneven[0]} are no multiple of"
                f" {job.channel_multiple}, which is the run's channel-multiple"
            )

    def targets(self, share: float, job: CutSettings) -> list[tuple[Cut, int]]:
        """Units that compete with each other, and the parameters that have to go of them."""
        competing = {
            "global": np.zeros_like(self.pools),
            "block": self.pools // 2,
            "kind": self.pools,
        }[job.selection]
        sets = [competing == number for number in range(int(competing.max()) + 1)]
        return [(own, share_of(int(self.costs[own].sum()), share)) for own in sets]

    def room(self, own: Cut, job: CutSettings) -> int:
        """Parameters by which a multiple of channels may miss a share."""
        channels = own & (self.pools % 2 == 1)
        first = np.unique(self.pools[channels], return_index=True)[1]
        return (job.channel_multiple - 1) * int(self.costs[channels][first].sum())

    def _channels_left(self, cut: Cut) -> list[int]:
        return [int((~own["channels"]).sum()) for own in self.by_block(cut)]

    def _is_uneven(self, index: int, stay: int, job: CutSettings) -> bool:
        return stay % job.channel_multiple != 0 and stay < self.numbers[index][1]
