"""Adapters whose updates do not change zeros of a pruned matrix, in training and after merging.

With ``W`` the stored matrix and ``M`` its mask of non-zero weights, the forward pass uses ``W + M *
(scaling * B A)``. For this, the product of the factors is computed completely. A step therefore
takes additional memory of the size of the adapted matrices, and additional time.
"""

from typing import Any

from torch import Tensor, nn

from espalier.hf.opening.opened import OpenedModel
from espalier.hf.whole.adapters import NAME, module_path
from espalier.models.adapters import AdapterPlan


def keep_zeros(model: OpenedModel, whole: nn.Module, adapters: AdapterPlan) -> None:
    """Mask the updates of all adapters in a whole model.

    Parameters
    ----------
    model : source of the matrices with their zeros
    whole : model in memory with adapters inserted
    adapters : adapters of the run
    """
    for index, adapter in adapters:
        module: Any = whole.get_submodule(module_path(model.family, index, adapter.linear.name))
        zeros = model.checkpoint.read(adapter.linear.parameter) == 0
        module.forward = _MaskedForward(module, zeros.to(module.lora_A[NAME].weight.device))


class _MaskedForward:
    """Replacement of peft's forward pass of one matrix."""

    def __init__(self, module: Any, zeros: Tensor) -> None:
        self._module = module
        self._zeros = zeros

    def __call__(self, inputs: Tensor) -> Tensor:
        """Map (..., in_features) to (..., out_features), in the dtype of the base's output."""
        module = self._module
        b = module.lora_B[NAME].weight
        a = module.lora_A[NAME].weight
        update = (module.scaling[NAME] * (b @ a)).masked_fill(self._zeros, 0)
        found: Tensor = module.base_layer(inputs)
        dropped = module.lora_dropout[NAME](inputs).to(update.dtype)
        return found + nn.functional.linear(dropped, update).to(found.dtype)
