"""Adapters that leave zeros alone: the update of a pruned matrix is masked, in training as in the merged model.

With ``W`` the matrix of the files and ``M`` one where it is not zero, what is computed is ``W + M * (scaling * B A)``. The
product of the factors is made whole for that, so a step takes as much memory more as the adapted matrices have, and some time.
"""

from typing import Any

from torch import Tensor, nn

from espalier.hf.opening.opened import OpenedModel
from espalier.hf.whole.adapters import NAME, module_path
from espalier.models.adapters import AdapterPlan


def keep_zeros(model: OpenedModel, whole: nn.Module, adapters: AdapterPlan) -> None:
    """Mask the updates of all adapters that were put into a whole model; ``model`` has the matrices with their zeros."""
    for index, adapter in adapters:
        module: Any = whole.get_submodule(module_path(model.family, index, adapter.linear.name))
        zeros = model.checkpoint.read(adapter.linear.parameter) == 0
        module.forward = _MaskedForward(module, zeros.to(module.lora_A[NAME].weight.device))


class _MaskedForward:
    """Takes the place of peft's forward pass of one matrix."""

    def __init__(self, module: Any, zeros: Tensor) -> None:
        self._module = module
        self._zeros = zeros

    def __call__(self, inputs: Tensor) -> Tensor:
        """(..., in_features) -> (..., out_features), in the dtype of the base's output."""
        module = self._module
        b = module.lora_B[NAME].weight
        a = module.lora_A[NAME].weight
        update = (module.scaling[NAME] * (b @ a)).masked_fill(self._zeros, 0)
        found: Tensor = module.base_layer(inputs)
        dropped = module.lora_dropout[NAME](inputs).to(update.dtype)
        return found + nn.functional.linear(dropped, update).to(found.dtype)
