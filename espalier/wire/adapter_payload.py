"""Adapter tensors as they travel: in float32, in bfloat16, or in NF4 (half a byte and a sixteenth per number).

``float32`` travels as it is. The others lose something, in proportion to what they round; so they hold differences from
adapters that both sides have (``rounding = "differences"``): up from those that the round began with, down from the first ones.
With error feedback the sender adds what was lost to what it sends the next time (see ``pruning_kernels.error_feedback``).
An NF4 tensor is two on the wire: ``<name>.codes``, ``<name>.absmax``.
"""

from collections.abc import Callable, Mapping

import torch
from safetensors.torch import load, save
from torch import Tensor

from espalier.settings.federation import Payload
from espalier.settings.mistakes import Mistake
from espalier.wire.payload import TensorSpec
from pruning_kernels import nf4
from pruning_kernels.error_feedback import BFLOAT16, NF4, encode_with_feedback
from pruning_kernels.nf4 import Nf4
from pruning_kernels.scores import NotFiniteError

Shape = tuple[int, ...]
PLAIN = {"float32": ("F32", torch.float32), "bfloat16": ("BF16", torch.bfloat16)}


def payload_specs(shapes: Mapping[str, Shape], payload: Payload) -> dict[str, TensorSpec]:
    """The tensors of a blob that holds tensors of these shapes."""
    if payload != "nf4":
        return {name: TensorSpec(PLAIN[payload][0], shape) for name, shape in shapes.items()}
    specs = {}
    for name, shape in shapes.items():
        size = torch.Size(shape).numel()
        specs[f"{name}.codes"] = TensorSpec("U8", (-(-size // 2),))
        specs[f"{name}.absmax"] = TensorSpec("F32", (-(-size // nf4.BLOCK),))
    return specs


def pack_adapters(
    tensors: Mapping[str, Tensor], payload: Payload, residuals: Mapping[str, Tensor] | None = None
) -> tuple[bytes, dict[str, Tensor]]:
    """Serialise tensors of one blob.

    Parameters
    ----------
    tensors : what the blob holds, values or differences: float32, by canonical name
    residuals : what earlier payloads lost, float32; missing ones are zero, None: nothing is added. Where a tensor has another
        rank by now, what was lost in rows and columns that it no longer has is forgotten, and that of new ones is zero

    Returns
    -------
    blob, and what it loses, by name: float32, empty for ``float32``, which loses nothing

    Raises
    ------
    Mistake
        A number is not finite, or has no finite code.
    """
    packed = {}
    lost = {}
    for name, tensor in tensors.items():
        value = tensor.detach().to("cpu", torch.float32).contiguous()
        before = _fitted((residuals or {}).get(name), value)
        try:
            if payload == "float32":
                packed[name] = _finite(value)
            elif payload == "bfloat16":
                packed[name], lost[name] = encode_with_feedback(value, before, BFLOAT16)
            else:
                code, lost[name] = encode_with_feedback(value, before, NF4)
                packed |= {f"{name}.codes": code.packed, f"{name}.absmax": code.absmax}
        except NotFiniteError:
            raise Mistake(
                f"{name}: training led to numbers that are not finite; lower training.learning-rate"
            ) from None
    return save({name: packed[name] for name in sorted(packed)}), lost


def unpack_adapters(
    shapes: Mapping[str, Shape], blob: bytes, payload: Payload
) -> dict[str, Tensor]:
    """Read a blob whose tensors are as ``payload_specs`` demands them: float32, by canonical name.

    Raises
    ------
    Mistake
        A number is not finite, NF4 codes are damaged, or a tensor has another shape.
    """
    found = load(blob)
    return {
        name: read_adapter(found.__getitem__, name, shape, payload)
        for name, shape in shapes.items()
    }


def read_adapter(
    read: Callable[[str], Tensor], name: str, shape: Shape, payload: Payload
) -> Tensor:
    """One tensor, float32, from those of its blob; ``read`` gets their names.

    Raises
    ------
    Mistake
        As ``unpack_adapters``, or the tensor has another shape.
    """
    try:
        if payload == "nf4":
            return nf4.decode(Nf4(read(f"{name}.codes"), read(f"{name}.absmax")), shape)
        found = read(name)
        if tuple(found.shape) != tuple(shape):
            raise ValueError(f"is {list(found.shape)}, must be {list(shape)}")
        return _finite(found.to(torch.float32))
    except NotFiniteError:
        raise Mistake(f"{name}: a number is not finite") from None
    except ValueError as error:
        raise Mistake(f"{name}: {error}") from None


def differences(tensors: Mapping[str, Tensor], start: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What leads from ``start`` to the tensors of one blob: float32, by canonical name."""
    return {
        name: tensor.detach().to("cpu", torch.float32) - start[name]
        for name, tensor in tensors.items()
    }


def sums(start: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """``start`` and the differences from it that arrived: float32, by canonical name."""
    return {name: start[name] + difference for name, difference in found.items()}


def _fitted(residual: Tensor | None, value: Tensor) -> Tensor:
    """What is owed to a tensor, shaped like it."""
    fitted = torch.zeros_like(value)
    if residual is not None:
        common = tuple(slice(min(sizes)) for sizes in zip(residual.shape, value.shape, strict=True))
        fitted[common] = residual[common]
    return fitted


def _finite(tensor: Tensor) -> Tensor:
    if not bool(torch.isfinite(tensor).all()):
        raise NotFiniteError
    return tensor
