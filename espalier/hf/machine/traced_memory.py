"""How much memory a computation takes at most, found by going through it with tensors that have shapes and no numbers.

The model's own code runs on torch's fake tensors; every tensor that it makes is noted when it appears and when it is gone. So
what is found is what a device would hold that frees each tensor as soon as nobody needs it, as a CPU's allocator does with
large ones (``computing.return_large_blocks``).
Does not cover: what a kernel holds while it runs, such as a packed copy of a matrix, and tensors that were there before.
"""

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all tensors that operations within made and that are still there, but for those ``held`` before."""

    def __init__(self, held: Iterable[Tensor]) -> None:
        super().__init__()
        self.now = 0
        self.most = 0
        self._known: weakref.WeakSet[Any] = weakref.WeakSet(
            tensor.untyped_storage() for tensor in held
        )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and note what it returns."""
        made = func(*args, **(kwargs or {}))
        for one in tree_leaves(made):
            if isinstance(one, Tensor):
                self.note(one)
        return made

    def note(self, tensor: Tensor) -> None:
        """A tensor is there from now on."""
        storage = tensor.untyped_storage()
        if storage in self._known:
            return
        size = storage.nbytes()
        self._known.add(storage)
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._let_go, size)

    def _let_go(self, size: int) -> None:
        self.now -= size


@contextmanager
def traced(module: Any, dtype: torch.dtype) -> Iterator[LiveBytes]:
    """Operations within have no numbers; ``module``, which has no memory, becomes one of a pretended CPU for good.

    Parameters
    ----------
    dtype : of its parameters that ask for no gradient, where they are floating
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    for parameter in module.parameters():
        if parameter.is_floating_point() and not parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
    with FakeTensorMode(allow_non_fake_inputs=True):
        module.to_empty(device="cpu")
        with LiveBytes([*module.parameters(), *module.buffers()]) as live:
            yield live
