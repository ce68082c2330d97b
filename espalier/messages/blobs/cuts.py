"""Structured cuts as one blob per block: a bit per prunable group, and biases or scales.

Biases and scales compensate for the groups that are cut. ``cut_bits`` has the form without them.
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
    unpack_tensors,
    views,
)
from espalier.models.groups import Cut, Groups
from espalier.models.plan import ModelPlan, PlanOf, block_key
from espalier.models.structure import GROUP_KINDS, sizes_of
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
            **{scale_name(kind): scale for kind, scale in (scales or {}).items()},
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
        tensors = tensors_of(block.index)
        for kind in GROUP_KINDS:
            view = cut[groups.at(block.index, kind)]
            # A view into ``cut``.
            view[:] = unpack(tensors[cut_name(kind)], view.shape)
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
            num_groups = getattr(self._sizes[key], kind)
            # Padding bits could carry data past the contract.
            if not has_clean_padding(words, num_groups):
                raise ProtocolError(f"{key} {kind}: bits are set beyond the last group")
            if unpack(words, (1, num_groups)).all():
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
