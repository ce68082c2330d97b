"""A smaller model from what was decided about it: the base, the cut units, and the biases that make up for them."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from espalier.modeling.dtypes import TORCH_DTYPES
from espalier.modeling.opened import OpenedModel
from espalier.wire.cuts import biases_of, structure_of
from espalier.wire.structure import structured_plan


def open_cut(model: OpenedModel, blob_of: Callable[[int], bytes], biases: Sequence[str]) -> OpenedModel:
    """Open what a base keeps.

    Parameters
    ----------
    model : the base
    blob_of : block index -> its blob (``espalier.wire.cuts``)
    biases : canonical names of the matrices that get a bias; it is rounded to the dtype of their weights
    """
    structure = structure_of(model.plan, blob_of, biases)
    given: dict[str, Tensor] = {}
    for index, block in enumerate(structured_plan(model.plan, structure).blocks):
        values = biases_of(blob_of(structure.blocks[index].source), biases)
        for linear in block.linears:
            if linear.name in values:
                bias = torch.from_numpy(values[linear.name].copy()).to(TORCH_DTYPES[linear.dtype])
                given[linear.parameter.removesuffix("weight") + "bias"] = bias
    return OpenedModel(model.directory, structure, given)
