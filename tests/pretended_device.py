"""Pretended CUDA device: its tensors lie on the CPU and refuse what a real device would refuse.

Covers: tensors of two devices in one operation, NumPy views of device tensors, results on the wrong
device. Values, gradients and views are those of the CPU.
Does not cover: kernels that a device lacks, its order of summation, its memory, its streams, and
``torch.cuda``.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

PRETENDED = torch.device("cuda", 0)
MEETING_PLACES = {"aten.copy_.default", "aten._to_copy.default"}
"""Operations whose tensors may lie on two devices."""
INDEXED = ("aten.index.", "aten.index_put", "aten._index_put_impl_", "aten._unsafe_index")
"""Operations on a device tensor that accept index tensors on the CPU."""
READERS = (Tensor.numpy, Tensor.__array__, Tensor.data_ptr)


class DeviceTensor(Tensor):
    """Tensor on the pretended device; ``inner`` holds its values on the CPU."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> "DeviceTensor":
        made: DeviceTensor = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
        )
        made.inner = inner
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return PRETENDED

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]
        return False

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"on the pretended device: {self.inner!r}"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        _require_one_device(str(func), args, kwargs)
        given: dict[int, Tensor] = {}

        def inner(value: Any) -> Any:
            if not isinstance(value, DeviceTensor):
                return value
            # An in-place operation must return the given wrapper and not a new one.
            given[id(value.inner)] = value
            return value.inner

        found = func(*tree_map(inner, args), **tree_map(inner, kwargs))
        # ``copy_`` returns its target, which may lie on the CPU while the source is on the device.
        if str(func) == "aten.copy_.default":
            return args[0]
        return tree_map(lambda value: given.get(id(value), _wrapped(value)), found)


def _wrapped(value: Any) -> Any:
    plain = isinstance(value, Tensor) and not isinstance(value, DeviceTensor) and not value.is_meta
    return DeviceTensor(value) if plain else value


def _require_one_device(name: str, args: Any, kwargs: Any) -> None:
    """Raise RuntimeError for tensors of two devices; as in CUDA, CPU fields are allowed."""
    if name in MEETING_PLACES:
        return
    considered = args[:1] + args[2:] if name.startswith(INDEXED) else args
    devices: set[str] = set()

    def look(value: Any) -> None:
        if isinstance(value, Tensor) and (isinstance(value, DeviceTensor) or value.ndim):
            devices.add(value.device.type)

    tree_map(look, (considered, kwargs))
    if len(devices) > 1:
        raise RuntimeError(
            f"{name}: expected all tensors to be on the same device, found {sorted(devices)}"
        )


class _Pretence(TorchFunctionMode):
    """Mode that handles calls with a CUDA device before torch, which has none, sees them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        # No real device would copy from pinned memory.
        kwargs.pop("pin_memory", None)
        first = args[0] if args else None
        if func in READERS and isinstance(first, DeviceTensor):
            raise TypeError(f"can't convert a tensor of {PRETENDED} to numpy, nor read its memory")
        if func is Tensor.tolist and isinstance(first, DeviceTensor):
            return first.detach().inner.tolist()  # type: ignore[attr-defined]
        if func in (Tensor.cpu, Tensor.cuda):
            return _moved(
                first, torch.device("cpu") if func is Tensor.cpu else PRETENDED, copy=False
            )
        if func is Tensor.to:
            return _to(*args, **kwargs)
        if kwargs.get("device") is None or func is torch.Tensor.device.__get__:
            return func(*args, **kwargs)
        target = torch.device(kwargs.pop("device"))
        found = func(*args, **kwargs, device="cpu" if target.type == "cuda" else target)
        if (
            isinstance(first, DeviceTensor)
            and target.type == "cpu"
            and isinstance(found, DeviceTensor)
        ):
            # The call was ``empty_like(..., device="cpu")``.
            return found.inner
        return _wrapped(found) if target.type == "cuda" else found


def _to(value: Tensor, *args: Any, copy: bool = False, **kwargs: Any) -> Tensor:
    """Handle all forms of ``Tensor.to``.

    Across devices the result is another tensor; that of a leaf has no gradient.
    """
    other = kwargs.pop("other", None)
    if args and isinstance(args[0], Tensor):
        other = args[0]
        args = args[1:]
    if other is not None:
        args = (other.device, other.dtype, *args)
    device, dtype, _, memory_format = torch._C._nn._parse_to(*args, **kwargs)
    format_of = {} if memory_format is None else {"memory_format": memory_format}
    # torch must see a plain call here, without the mode.
    with torch._C.DisableTorchFunction():
        here = Tensor.to(value, dtype or value.dtype, copy=copy, **format_of)
    return here if device is None else _moved(here, device, copy=False)


def _moved(value: Tensor, device: torch.device, copy: bool) -> Tensor:
    if device.type == value.device.type:
        return value
    # A meta tensor has no values, so the copy has none either.
    if device.type == "meta" or value.is_meta:
        return torch.empty_like(
            value.inner if isinstance(value, DeviceTensor) else value, device=device
        )
    if value.requires_grad and not value.is_leaf and torch.is_grad_enabled():
        crossed: Tensor = _Crossing.apply(value)
        return crossed
    return _across(value)


def _across(value: Tensor) -> Tensor:
    """Return a copy on the other device, without a gradient of its own."""
    if isinstance(value, DeviceTensor):
        return value.inner.detach().clone()
    return DeviceTensor(value.detach().clone())


class _Crossing(torch.autograd.Function):
    """Copy to the other device, whose gradient comes back."""

    @staticmethod
    def forward(_: Any, value: Tensor) -> Tensor:  # type: ignore[override]
        return _across(value)

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return _across(gradient)


@contextmanager
def pretended_device() -> Iterator[torch.device]:
    """Pretend the CUDA device 0 within the block, and yield it."""
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    # Parameters change their class when they move to the device.
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        with _Pretence():
            yield PRETENDED
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swaps)
