"""Tensors of a model that are trained completely, in contrast to adapters.

Examples are a classification head, norms and biases. They are addressed by blob key and canonical
name. They are float32 regardless of the format of the base, because training steps are too small
for bfloat16. The model still computes in its own dtype: it uses the float32 tensor rounded to that
dtype, and the gradient flows to the float32 tensor.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from espalier.errors import InputError
from espalier.hf.files.tensor_pieces import converted
from espalier.hf.opening.opened_model import OpenedModel
from espalier.models.plan import block_of_key

Names = Mapping[str, Iterable[str]]
"""Canonical names by blob key."""


def stored_values(model: OpenedModel, names: Names) -> dict[str, dict[str, Tensor]]:
    """Return the values in the model's files: float32, on the CPU, by blob key and canonical name.

    Raises InputError if the model's files do not hold the tensor, or it cannot be read.
    """
    cpu = torch.device("cpu")
    return {
        key: {
            name: converted(model.checkpoint, _stored(model, key, name), torch.float32, cpu)
            for name in names[key]
        }
        for key in names
    }


def trained_whole(
    model: OpenedModel, whole: nn.Module, names: Names
) -> dict[str, dict[str, nn.Parameter]]:
    """Make tensors of a model trainable and return their float32 parameters, by key and name.

    Call it before adapters are inserted. A head is trained as it is, because it is float32 already.
    Raises InputError if the model has no such tensor, or holds it in NF4.
    """
    return {
        key: {name: _trainable(model, whole, key, name) for name in names[key]} for key in names
    }


def _trainable(model: OpenedModel, hf_model: nn.Module, key: str, name: str) -> nn.Parameter:
    path = _path(model, key, name)
    try:
        parameter = hf_model.get_parameter(path)
    except AttributeError:
        raise _no_such_tensor(model, key, name) from None
    if not parameter.dtype.is_floating_point:
        raise InputError(
            f"training.base = 'nf4': {key} {name} is stored in 4 bits and cannot be trained as a"
            " whole; choose another base"
        )
    if parameter.dtype == torch.float32:
        parameter.requires_grad_(True)
        return parameter
    owner, _, kind = path.rpartition(".")
    module = hf_model.get_submodule(owner)
    # Training starts from the stored value, not from the value rounded to the base's dtype.
    exact = nn.Parameter(
        converted(model.checkpoint, _stored(model, key, name), torch.float32, parameter.device)
    )
    setattr(module, kind, exact)
    # unsafe=True allows a parametrization that changes the dtype.
    parametrize.register_parametrization(module, kind, _Rounded(parameter.dtype), unsafe=True)
    return exact


class _Rounded(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def forward(self, exact: Tensor) -> Tensor:
        return exact.to(self._dtype)


def _path(model: OpenedModel, key: str, name: str) -> str:
    path = model.family.parameter_path(name, block_of_key(key))
    if path is None:
        raise _no_such_tensor(model, key, name)
    return path


def _stored(model: OpenedModel, key: str, name: str) -> str:
    stored = model.stored_name(_path(model, key, name))
    if stored is None:
        raise _no_such_tensor(model, key, name)
    return stored


def _no_such_tensor(model: OpenedModel, key: str, name: str) -> InputError:
    return InputError(
        f"{model.directory}: contains no {name} of {key}; choose another tensor for full training"
    )
