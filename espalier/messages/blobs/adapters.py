"""Adapter tensors as blobs of a message, in float32, bfloat16 or NF4.

NF4 takes 4 bits per number and 1/16 byte for scales. ``float32`` is lossless. The error of the
other wire dtypes is proportional to the values that are rounded. To keep it small, these dtypes
carry differences from adapters that both sides have (``rounding = "differences"``): a client sends
differences from the adapters that began the round, and the server sends differences from the first
adapters of the run. With error feedback the sender adds the rounding error of one message to the
values of the next (see ``pruning_kernels.lora.error_feedback``). An NF4 tensor is stored as two:
``<name>.codes`` and ``<name>.absmax``.
"""

from collections.abc import Callable, Mapping

import torch
from safetensors.torch import load, save
from torch import Tensor

from espalier.errors import ProtocolError
from espalier.settings.tables.federation import FederationSettings, WireDtype
from pruning_kernels.lora import nf4
from pruning_kernels.lora.error_feedback import BFLOAT16, NF4, encode_with_feedback
from pruning_kernels.lora.nf4 import Nf4
from pruning_kernels.selection.scores import NotFiniteError

Shape = tuple[int, ...]


def pack_adapters(
    tensors: Mapping[str, Tensor],
    wire_dtype: WireDtype,
    residuals: Mapping[str, Tensor] | None = None,
) -> tuple[bytes, dict[str, Tensor]]:
    """Serialize the adapter tensors of one blob.

    Raises ProtocolError if a number is not finite, or has no finite code.

    Parameters
    ----------
    tensors : values or differences, float32, by canonical name
    residuals : rounding errors of earlier messages, float32, by canonical name. A missing one
        counts as zero, and so do all if this is None. If the rank of a tensor has changed, rows and
        columns that no longer exist are dropped, and new ones start at zero.

    Returns
    -------
    blob : bytes
        Safetensors blob.
    lost : dict of str to Tensor
        Rounding error of each tensor, float32, by canonical name. Empty for ``float32``, which is
        lossless.
    """
    packed = {}
    new_residuals = {}
    for name, tensor in tensors.items():
        # Contiguous, because safetensors stores the memory as it is.
        value = tensor.detach().to("cpu", torch.float32).contiguous()
        residual = _fitted((residuals or {}).get(name), value)
        try:
            if wire_dtype == "float32":
                packed[name] = _finite(value)
            elif wire_dtype == "bfloat16":
                packed[name], new_residuals[name] = encode_with_feedback(value, residual, BFLOAT16)
            else:
                code, new_residuals[name] = encode_with_feedback(value, residual, NF4)
                packed |= {f"{name}.codes": code.packed, f"{name}.absmax": code.absmax}
        except NotFiniteError:
            raise ProtocolError(
                f"{name}: training led to numbers that are not finite; lower training.learning-rate"
            ) from None
    # Sorted, so that equal values have equal bytes and the contract knows the order.
    return save({name: packed[name] for name in sorted(packed)}), new_residuals


def unpack_adapters(
    shapes: Mapping[str, Shape], blob: bytes, wire_dtype: WireDtype
) -> dict[str, Tensor]:
    """Read a blob whose tensors match ``payload_specs``: float32, by canonical name.

    Raises ProtocolError if a number is not finite, NF4 codes are damaged, or a tensor has another
    shape.
    """
    tensors = load(blob)
    return {
        name: read_adapter(tensors.__getitem__, name, shape, wire_dtype)
        for name, shape in shapes.items()
    }


def read_adapter(
    read: Callable[[str], Tensor], name: str, shape: Shape, wire_dtype: WireDtype
) -> Tensor:
    """Read one adapter tensor from its blob and return it in float32.

    Raises ProtocolError if a number is not finite, NF4 codes are damaged, or the tensor has another
    shape.

    Parameters
    ----------
    read : function that returns a stored tensor by its name in the blob
    name : canonical name of the adapter tensor
    shape : shape of the adapter tensor
    """
    try:
        if wire_dtype == "nf4":
            return nf4.decode(Nf4(read(f"{name}.codes"), read(f"{name}.absmax")), shape)
        tensor = read(name)
        # The shape was announced; a message is not trusted to keep it.
        if tuple(tensor.shape) != tuple(shape):
            raise ValueError(f"is {list(tensor.shape)}, must be {list(shape)}")
        return _finite(tensor.to(torch.float32))
    except NotFiniteError:
        raise ProtocolError(f"{name}: a number is not finite") from None
    except ValueError as error:
        raise ProtocolError(f"{name}: {error}") from None


def differences(tensors: Mapping[str, Tensor], start: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return ``tensors - start`` for the tensors of one blob, in float32, by canonical name."""
    return {
        name: tensor.detach().to("cpu", torch.float32) - start[name]
        for name, tensor in tensors.items()
    }


def sums(start: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return ``start`` plus the received differences, in float32, by canonical name."""
    # In float32, as on the other side: both sides get the same values.
    return {name: start[name] + difference for name, difference in found.items()}


def _fitted(residual: Tensor | None, value: Tensor) -> Tensor:
    """Return the residual cropped or padded with zeros to the shape of ``value``."""
    fitted = torch.zeros_like(value)
    if residual is not None:
        # The common corner: ranks are added or removed at the end.
        common = tuple(slice(min(sizes)) for sizes in zip(residual.shape, value.shape, strict=True))
        fitted[common] = residual[common]
    return fitted


def _finite(tensor: Tensor) -> Tensor:
    if not bool(torch.isfinite(tensor).all()):
        raise NotFiniteError
    return tensor


def read_layer(
    blobs: Mapping[str, bytes], first: Mapping[str, Tensor], federation: FederationSettings
) -> dict[str, Tensor]:
    """Read the layer that the server sent: float32, by canonical name.

    Raises ProtocolError if a blob is damaged, or if a number is not finite.

    Parameters
    ----------
    blobs : blob of each tensor by canonical name
    first : layer at the beginning of the run. Rounded wire dtypes carry differences from it.
    """
    tensors: dict[str, Tensor] = {}
    for name, value in first.items():
        tensors |= unpack_adapters({name: tuple(value.shape)}, blobs[name], federation.wire_dtype)
    return sums(first, tensors) if federation.sends_differences else tensors
