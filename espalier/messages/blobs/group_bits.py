"""Bit vector of the prunable groups that are cut from a model, and checks of its changes.

Prunable groups are the attention groups and FFN channels of all blocks, in one sequence: for each
block its attention groups, then its FFN channels. The order is that of ``KINDS`` and of
``espalier.hf.structured.groups``. Cuts are final: a group that is cut stays cut.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from espalier.errors import ProtocolError
from espalier.messages.blobs.cuts import KINDS
from espalier.messages.payload import TensorSpec, pack_tensors, tensor_specs, views
from espalier.models.plan import ModelPlan
from espalier.models.structure import Structure, unit_costs, units_of
from espalier.settings.structured import CutSettings
from pruning_kernels.groups.groups import share_of
from pruning_kernels.votes.bitmask import has_clean_padding, num_words, pack, unpack

CUT = "units.cut"
"""Name of the tensor with the bits: 1 = cut."""

Cut = NDArray[np.bool_]
"""Array of shape (units,): True for prunable groups that are cut."""


@dataclass(frozen=True, eq=False)
class CutUnits:
    """Prunable groups of a model: their number, their cost, and the pool that each belongs to."""

    plan: ModelPlan
    numbers: tuple[tuple[int, int], ...]
    """Number of attention groups and of FFN channels of each block."""
    costs: NDArray[np.int64]
    """Number of parameters of each prunable group, (units,)."""
    pools: NDArray[np.int64]
    """Pool of each prunable group, (units,): twice the block number, plus 1 for channels."""

    @staticmethod
    @lru_cache(maxsize=4)
    def of(plan: ModelPlan) -> "CutUnits":
        """Return the prunable groups of a model."""
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

    # ----- bits -----

    @property
    def none(self) -> Cut:
        """Bit vector with nothing cut."""
        return np.zeros(len(self.costs), np.bool_)

    @property
    def specs(self) -> dict[str, TensorSpec]:
        """Specs of the tensors of a blob."""
        return {CUT: TensorSpec("U64", (num_words(len(self.costs)),))}

    def pack(self, cut: Cut) -> bytes:
        """Serialize a bit vector as a blob."""
        return pack_tensors({CUT: pack(cut)})

    def read(self, blob: bytes) -> Cut:
        """Read a bit vector from a blob.

        Raises
        ------
        ProtocolError
            If the blob is not a bit vector of this model, or if it cuts all groups or all channels
            of a block.
        """
        if tensor_specs(blob) != self.specs:
            raise ProtocolError(
                f"{CUT}: these are not the bits of this model's {len(self.costs)} groups and"
                " channels"
            )
        words = views(blob)[CUT]
        if not has_clean_padding(words, len(self.costs)):
            raise ProtocolError(f"{CUT}: bits are set beyond the last unit")
        cut = unpack(words, self.costs.shape)
        stay = np.bincount(self.pools[~cut], minlength=2 * len(self.numbers))
        if not stay.all():
            empty = int(np.flatnonzero(stay == 0)[0])
            raise ProtocolError(
                f"{CUT}: all {KINDS[empty % 2]} of block {empty // 2} are cut, one must stay"
            )
        return cut

    # ----- structure -----

    def by_block(self, cut: Cut) -> list[dict[str, Cut]]:
        """Split a bit vector by block and kind."""
        pieces = iter(
            np.split(cut, np.cumsum([number for own in self.numbers for number in own])[:-1])
        )
        return [{kind: next(pieces) for kind in KINDS} for _ in self.numbers]

    def side_by_side(self, cuts: Sequence[dict[str, Cut]]) -> Cut:
        """Invert ``by_block``."""
        return np.concatenate([own[kind] for own in cuts for kind in KINDS])

    def structure(self, cut: Cut) -> Structure:
        """Return the structure of the model that remains."""
        kept = {
            index: {kind: np.flatnonzero(~units).tolist() for kind, units in own.items()}
            for index, own in enumerate(self.by_block(cut))
        }
        return Structure.whole(self.plan).keeping(kept)

    # ----- pruning ratio -----

    def share(self, cut: Cut) -> float:
        """Return the fraction of the parameters of all prunable groups that is cut."""
        return float(self.costs[cut].sum() / self.costs.sum())

    def wanted(self, job: CutSettings) -> float:
        """Return the requested pruning ratio relative to the parameters of all prunable groups."""
        everything = int(self.costs.sum())
        # Product and quotient give the bits of ``ModelUnits.share_of_units``.
        return job.share * everything / everything

    def reaches(self, cut: Cut, share: float, job: CutSettings) -> bool:
        """Return True if each competing set has the ratio ``share`` or nothing left to cut."""
        stays = ~cut & self._can_go(cut, job)
        return all(
            int(self.costs[own & cut].sum()) >= least or not (own & stays).any()
            for own, least in self.targets(share, job)
        )

    def _can_go(self, cut: Cut, job: CutSettings) -> NDArray[np.bool_]:
        """Return the mask of prunable groups in pools with more groups than must stay, (units,)."""
        stay = np.bincount(self.pools[~cut], minlength=2 * len(self.numbers))
        return (stay > self.must_stay(job))[self.pools]

    def must_stay(self, job: CutSettings) -> list[int]:
        """Return the minimum number of prunable groups that stay in each pool.

        One attention group stays. Of the channels ``channel_multiple`` stay, or all if there are
        fewer.
        """
        return [
            least
            for _, channels in self.numbers
            for least in (1, min(job.channel_multiple, channels))
        ]

    def require_step(self, before: Cut, after: Cut, share: float, job: CutSettings) -> None:
        """Check that a round cuts the requested ratio and exceeds it by less than one group.

        The cut may also be unchanged, since a client that lost its importance scores cuts nothing.
        With ``channel-multiple`` the number of remaining channels of each block is a multiple, so
        the cut may miss the ratio by up to ``channel-multiple - 1`` channels in each block.

        Parameters
        ----------
        before
            Cut before the round, (units,).
        after
            Cut after the round, (units,).
        share
            Requested pruning ratio.
        job
            Settings of the cut.

        Raises
        ------
        ProtocolError
            If a cut group came back, or if the cut is too small or too large.
        """
        if (before & ~after).any():
            raise ProtocolError(f"{CUT}: units that were cut before have come back")
        # A client that lost its importance scores cuts nothing.
        if np.array_equal(before, after):
            return
        for own, least in self.targets(share, job):
            spent = int(self.costs[own & after].sum())
            room = self.room(own, job)
            if spent < least - room:
                raise ProtocolError(f"{CUT}: less is cut than the share that was asked for")
            # The order of removal is unknown, so the largest new group counts as the last one.
            last = int(self.costs[own & after & ~before].max(initial=0))
            if last and spent - last >= least + room:
                raise ProtocolError(
                    f"{CUT}: more is cut than the share that was asked for, by a unit or more"
                )
        if uneven := [
            index
            for index, stay in enumerate(self._channels_left(after))
            if self._is_uneven(index, stay, job)
        ]:
            raise ProtocolError(
                f"{CUT}: the channels that stay in block {uneven[0]} are no multiple of"
                f" {job.channel_multiple}, which is the run's channel-multiple"
            )

    def targets(self, share: float, job: CutSettings) -> list[tuple[Cut, int]]:
        """Return each set of competing prunable groups and the number of its parameters to cut."""
        competing = {
            "global": np.zeros_like(self.pools),
            "block": self.pools // 2,
            "kind": self.pools,
        }[job.selection]
        sets = [competing == number for number in range(int(competing.max()) + 1)]
        return [(own, share_of(int(self.costs[own].sum()), share)) for own in sets]

    def room(self, own: Cut, job: CutSettings) -> int:
        """Return the number of parameters by which a multiple of channels may miss the target."""
        channels = own & (self.pools % 2 == 1)
        # All channels of a block have the same cost, so one index per block is enough.
        first = np.unique(self.pools[channels], return_index=True)[1]
        return (job.channel_multiple - 1) * int(self.costs[channels][first].sum())

    def _channels_left(self, cut: Cut) -> list[int]:
        return [int((~own["channels"]).sum()) for own in self.by_block(cut)]

    def _is_uneven(self, index: int, stay: int, job: CutSettings) -> bool:
        return stay % job.channel_multiple != 0 and stay < self.numbers[index][1]
