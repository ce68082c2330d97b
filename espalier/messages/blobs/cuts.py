"""Structured cuts as blobs: a bit per prunable group of a block, and biases or scales.

Biases and scales compensate for the groups that are cut.

The order of the bits is that of ``Groups``. Cuts are final: a group that is cut stays cut.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from espalier.errors import ProtocolError
from espalier.messages.contract import Contract
from espalier.messages.message import MessageBody
from espalier.messages.parts import Push, require_result_wanted
from espalier.messages.tensor_blobs import (
    TensorSpec,
    pack_tensors,
    tensor_specs,
    unpack_tensors,
    views,
)
from espalier.models.groups import Cut, Groups
from espalier.models.plan import ModelPlan, PlanOf, block_key
from espalier.models.structure import GROUP_KINDS, sizes_of
from espalier.settings.pruning import CutSettings
from espalier.settings.run import RunSettings
from pruning_kernels.votes.bitmask import has_clean_padding, num_words, pack, unpack

Arrays = Mapping[str, NDArray]
"""Tensors of a block's blob by name."""
MAX_SCALE = 10.0
"""Maximum absolute value of a scale (Kwon et al. 2022, section 4.3).

A fit with larger values is not meaningful.
"""


def cut_name(kind: str) -> str:
    """Return the tensor name of the bits of a kind of prunable group: 1 = cut."""
    return f"{kind}.cut"


def bias_name(linear: str) -> str:
    """Return the tensor name of the complete bias of a matrix."""
    return f"{linear}.bias"


def scale_name(kind: str) -> str:
    """Return the tensor name of the scales of a kind of prunable group; 0 for cut ones."""
    return f"{kind}.scale"


def cut_specs(
    plan: ModelPlan, biases: Sequence[str], scaled: Sequence[str] = ()
) -> dict[str, dict[str, TensorSpec]]:
    """Return the specs of the blobs that describe a smaller model, one per block.

    Parameters
    ----------
    biases : canonical names of matrices that get a bias, float32
    scaled : kinds whose prunable groups get a scale, float32
    """
    specs = {}
    for block in plan.blocks:
        sizes = sizes_of(plan, block)
        rows = {linear.name: linear.shape[0] for linear in block.linears}
        specs[block_key(block.index)] = {
            **{
                cut_name(kind): TensorSpec("U64", (num_words(getattr(sizes, kind)),))
                for kind in GROUP_KINDS
            },
            **{bias_name(name): TensorSpec("F32", (rows[name],)) for name in biases},
            **{scale_name(kind): TensorSpec("F32", (getattr(sizes, kind),)) for kind in scaled},
        }
    return specs


def pack_cut(
    groups: Groups,
    cut: Cut,
    index: int,
    biases: Mapping[str, NDArray[np.float32]] | None = None,
    scales: Mapping[str, NDArray[np.float32]] | None = None,
) -> bytes:
    """Serialize the cut of one block.

    Parameters
    ----------
    biases : biases by canonical name of their matrix
    scales : scales of the block's groups by kind
    """
    return pack_tensors(
        {
            **{cut_name(kind): pack(cut[groups.at(index, kind)]) for kind in GROUP_KINDS},
            **{bias_name(name): bias for name, bias in (biases or {}).items()},
            **{scale_name(kind): own for kind, own in (scales or {}).items()},
        }
    )


def read_cut(groups: Groups, blob_of: Callable[[int], bytes]) -> Cut:
    """Return the cut that the blobs of all blocks describe.

    Parameters
    ----------
    blob_of : function that returns the blob of a block by its number
    """
    return cut_of(groups, lambda index: unpack_tensors(blob_of(index)))


def cut_of(groups: Groups, tensors_of: Callable[[int], Arrays]) -> Cut:
    """Return the cut that the tensors of all blocks' blobs describe.

    Parameters
    ----------
    tensors_of : function that returns the tensors of a block's blob by its number
    """
    cut = groups.none
    for block in groups.plan.blocks:
        words = tensors_of(block.index)
        for kind in GROUP_KINDS:
            own = cut[groups.at(block.index, kind)]
            # A view into ``cut``.
            own[:] = unpack(words[cut_name(kind)], own.shape)
    return cut


def biases_of(tensors: Arrays, biases: Sequence[str]) -> dict[str, NDArray[np.float32]]:
    """Return the biases of a block by canonical name."""
    return {name: tensors[bias_name(name)] for name in biases}


def scales_of(tensors: Arrays) -> dict[str, NDArray[np.float32]]:
    """Return the scales of a block by kind; kinds without scales are left out."""
    return {kind: tensors[scale_name(kind)] for kind in GROUP_KINDS if scale_name(kind) in tensors}


class SomeOfEachKindStays:
    """Check of a block's cut: one group of each kind stays, and biases and scales are in range."""

    def __init__(self, plan: ModelPlan) -> None:
        self._sizes = {block_key(block.index): sizes_of(plan, block) for block in plan.blocks}

    def __call__(self, key: str, blob: bytes) -> None:
        """Check the blob of one block.

        Raises ProtocolError if all groups of a kind are cut, bits are set after the last group, a
        bias is not finite, or a scale exceeds ``MAX_SCALE``.
        """
        tensors = views(blob)
        for kind in GROUP_KINDS:
            words = tensors[cut_name(kind)]
            number = getattr(self._sizes[key], kind)
            # Padding bits could carry data past the contract.
            if not has_clean_padding(words, number):
                raise ProtocolError(f"{key} {kind}: bits are set beyond the last group")
            if unpack(words, (1, number)).all():
                raise ProtocolError(f"{key} {kind}: all are cut, one must stay")
        if not all(
            np.isfinite(tensor).all() for name, tensor in tensors.items() if name.endswith(".bias")
        ):
            raise ProtocolError(f"{key}: a bias is not a finite number")
        if not all(
            # NaN fails this comparison too.
            (np.abs(tensor) <= MAX_SCALE).all()
            for name, tensor in tensors.items()
            if name.endswith(".scale")
        ):
            raise ProtocolError(f"{key}: a scale is not a number, or beyond {MAX_SCALE:g}")


def push_of_cuts(
    request: MessageBody,
    plan_of: PlanOf,
    run: RunSettings,
    biases: Sequence[str],
    scaled: Sequence[str] = (),
) -> Contract:
    """Return the contract of a ``push`` with a part of the cut for evaluation.

    Raises ProtocolError if this run pushes no result, or if there is no such part.
    """
    require_result_wanted(run)
    plan = plan_of()
    specs = cut_specs(plan, biases, scaled)
    push = Push(specs=specs, check_values=SomeOfEachKindStays(plan))
    return push.contract(request, run)


CUT = "groups.cut"
"""Name of the tensor with the bits: 1 = cut."""


def bit_specs(groups: Groups) -> dict[str, TensorSpec]:
    """Return the specs of the tensors of a blob."""
    return {CUT: TensorSpec("U64", (num_words(len(groups.costs)),))}


def pack_bits(cut: Cut) -> bytes:
    """Serialize a cut as a blob."""
    return pack_tensors({CUT: pack(cut)})


def read_bits(groups: Groups, blob: bytes) -> Cut:
    """Read a cut from a blob.

    Raises ProtocolError if the blob is not a bit vector of this model, or if it cuts all groups or
    all channels of a block.
    """
    if tensor_specs(blob) != bit_specs(groups):
        raise ProtocolError(
            f"{CUT}: these are not the bits of this model's {len(groups.costs)} groups and channels"
        )
    words = views(blob)[CUT]
    if not has_clean_padding(words, len(groups.costs)):
        raise ProtocolError(f"{CUT}: bits are set beyond the last group")
    cut = unpack(words, groups.costs.shape)
    stay = groups.stay(cut)
    if not stay.all():
        empty = int(np.flatnonzero(stay == 0)[0])
        raise ProtocolError(
            f"{CUT}: all {GROUP_KINDS[empty % 2]} of block {empty // 2} are cut, one must stay"
        )
    return cut


def require_step(groups: Groups, before: Cut, after: Cut, ratio: float, job: CutSettings) -> None:
    """Check that a round cuts the requested ratio and exceeds it by less than one group.

    The cut may also be unchanged, since a client that lost its importance scores cuts nothing. With
    ``channel-multiple`` the number of remaining channels of each block is a multiple, so the cut
    may miss the ratio by up to ``channel-multiple - 1`` channels in each block. Raises
    ProtocolError if a cut group came back, or if the cut is too small or too large.

    Parameters
    ----------
    before : cut before the round
    after : cut after the round
    ratio : requested pruning ratio
    job : settings of the cut
    """
    # Cuts are final: adapters of removed rows do not exist any more.
    if (before & ~after).any():
        raise ProtocolError(f"{CUT}: groups that were removed earlier are present again")
    # A client that lost its importance scores cuts nothing.
    if np.array_equal(before, after):
        return
    for pools, target in groups.targets(ratio, job.selection):
        # The cut of each competition, and what a multiple of channels may add to it.
        spent = groups.spent(after, pools)
        room = groups.room(pools, job)
        if spent < target - room:
            raise ProtocolError(f"{CUT}: the pruning ratio is below the requested one")
        pool = groups.span(pools)
        # The order of removal is unknown, so the largest new group counts as the last one.
        last = int(groups.costs[pool][after[pool] & ~before[pool]].max(initial=0))
        if last and spent - last >= target + room:
            raise ProtocolError(
                f"{CUT}: the pruning ratio is above the requested one, by a group or more"
            )
    # Channels are every second pool.
    channels = groups.stay(after)[1::2]
    uneven = (channels % job.channel_multiple != 0) & (channels < groups.counts[1::2])
    if uneven.any():
        raise ProtocolError(
            f"{CUT}: the channels that stay in block {int(uneven.argmax())} are not a multiple of"
            f" {job.channel_multiple}, which is the run's channel-multiple"
        )
