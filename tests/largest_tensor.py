"""Size of the largest tensor that a computation creates."""

from types import TracebackType
from typing import Any, Self

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LargestTensor:
    """Mode that watches every operation of torch, nested ones included; views do not count.

    ``numbers`` is the largest number of elements of a new tensor.
    """

    def __init__(self) -> None:
        self.numbers = 0
        self._mode = _Watching(self)

    def __enter__(self) -> Self:
        self._mode.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._mode.__exit__(kind, error, traceback)


class _Watching(TorchDispatchMode):
    def __init__(self, largest: LargestTensor) -> None:
        super().__init__()
        self._largest = largest

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        made = function(*args, **(kwargs or {}))
        # Results that share storage with an argument are views or in-place results.
        given = {
            one.untyped_storage().data_ptr()
            for one in tree_leaves((args, kwargs))
            if isinstance(one, Tensor)
        }
        for one in tree_leaves(made):
            if (
                isinstance(one, Tensor)
                and not one.is_meta
                and one.untyped_storage().data_ptr() not in given
            ):
                self._largest.numbers = max(self._largest.numbers, one.numel())
        return made
