"""Peak memory of a computation on tensors without data.

The model's own code runs on torch's fake tensors. Each tensor is counted when it is created and
when it is freed. The result is the memory of a device that frees each tensor as soon as it is not
needed any more, as a CPU allocator does with large tensors (``computing.return_large_blocks``).

Does not cover: memory that a kernel uses while it runs, such as a packed copy of a matrix, and
tensors that existed before.
"""

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counter of the bytes of all live tensors that operations created within the context.

    Parameters
    ----------
    held : tensors that existed before and are not counted
    """

    def __init__(self, held: Iterable[Tensor]) -> None:
        super().__init__()
        self.now = 0
        self.most = 0
        self._known: weakref.WeakSet[Any] = weakref.WeakSet(
            tensor.untyped_storage() for tensor in held
        )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and count the tensors that it returns."""
        outputs = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(outputs):
            if isinstance(leaf, Tensor):
                self.note(leaf)
        return outputs

    def note(self, tensor: Tensor) -> None:
        """Count a tensor from now on until its storage is freed."""
        storage = tensor.untyped_storage()
        # Views share the storage of their base and take no memory of their own.
        if storage in self._known:
            return
        size = storage.nbytes()
        self._known.add(storage)
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._let_go, size)

    def _let_go(self, size: int) -> None:
        self.now -= size


def _first_expert(experts: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Pass all tokens through the first expert, as often as experts are chosen for a token.

    Values, which fake tensors lack, would decide how many tokens each expert gets.
    """
    inputs = hidden.repeat_interleave(chosen.shape[-1], dim=0)
    gate, up = nn.functional.linear(inputs, experts.gate_up_proj[0]).chunk(2, dim=-1)
    outputs = nn.functional.linear(experts.act_fn(gate) * up, experts.down_proj[0])
    weighted = outputs * weights.reshape(-1, 1).to(outputs.dtype)
    return weighted.view(len(hidden), -1, hidden.shape[-1]).sum(dim=1)


@contextmanager
def traced(module: Any, dtype: torch.dtype) -> Iterator[LiveBytes]:
    """Run operations in this context on fake tensors, and count their memory.

    ``module``, which is on the meta device, stays a module of fake CPU tensors afterwards.

    Parameters
    ----------
    module : module to run
    dtype : dtype of its floating-point parameters that do not require a gradient
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    for parameter in module.parameters():
        if parameter.is_floating_point() and not parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
    for submodule in module.modules():
        if isinstance(getattr(submodule, "gate_up_proj", None), nn.Parameter):
            submodule.forward = partial(_first_expert, submodule)
    with FakeTensorMode(allow_non_fake_inputs=True):
        module.to_empty(device="cpu")
        with LiveBytes([*module.parameters(), *module.buffers()]) as live:
            yield live
