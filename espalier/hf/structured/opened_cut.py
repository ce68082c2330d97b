"""Pruned model opened from blobs: removed groups, and biases or scales that compensate."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from espalier.hf.files.tensor_pieces import TORCH_DTYPES
from espalier.hf.opening.opened import OpenedModel
from espalier.messages.blobs.cuts import biases_of, read_cut, scales_of
from espalier.models.groups import Groups
from espalier.models.structure import READERS, group_size, structured_plan


def open_cut(
    model: OpenedModel, blob_of: Callable[[int], bytes], biases: Sequence[str]
) -> OpenedModel:
    """Open the pruned model that the blobs describe.

    Scales of groups are applied to the columns of the matrices that read them.

    Parameters
    ----------
    model : the base
    blob_of : function from a block index to its blob (``espalier.messages.blobs.cuts``)
    biases : canonical names of the matrices that get a bias, which is rounded to the dtype of their
        weights
    """
    groups = Groups.of(model.plan)
    structure = groups.structure(read_cut(groups, blob_of), biases)
    given: dict[str, Tensor] = {}
    scales: dict[str, Tensor] = {}
    for block, kept in zip(
        structured_plan(model.plan, structure).blocks, structure.blocks, strict=True
    ):
        blob = blob_of(kept.source)
        values = biases_of(blob, biases)
        for kind, own in scales_of(blob).items():
            size = group_size(model.plan, READERS[kind], kind)
            columns = torch.from_numpy(own[list(kept.kept(kind))]).repeat_interleave(size)
            # Columns with scales of 1 are read unchanged.
            if not (columns == 1).all():
                scales[block.linear(READERS[kind]).parameter] = columns
        for linear in block.linears:
            if linear.name in values:
                bias = torch.from_numpy(values[linear.name].copy()).to(TORCH_DTYPES[linear.dtype])
                given[linear.parameter.removesuffix("weight") + "bias"] = bias
    return OpenedModel(model.directory, structure, given, scales)
