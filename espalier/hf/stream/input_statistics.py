"""Input statistics of linears, and statistics as blobs.

The statistics are sums of squares per channel, or the Gram matrix of all channels.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from espalier.messages.tensor_blobs import pack_tensors, unpack_tensors
from pruning_kernels.selection.local_pruning import DampingMean, InputStatistics, LocalPruning
from pruning_kernels.sparsegpt import Factor, factorise

CHANNELS_AT_ONCE = 512


S = TypeVar("S", covariant=True)
"""Statistics of one module's input."""


class InputObserver(ABC, Generic[S]):
    """Observer of the inputs of a block's modules while samples pass through the block."""

    samples = 0
    """Number of samples that pass through the block; set before ``found`` is called."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = modules
        # The last input, and what it led to: linears that share an input are called in sequence.
        self._last: tuple[Tensor, Any] | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Collect statistics from every forward pass within this context."""
        hooks = [
            module.register_forward_pre_hook(partial(self._hook, name))
            for name, module in self._modules.items()
        ]
        try:
            yield
        finally:
            # The last input must not stay in memory.
            self._last = None
            for hook in hooks:
                hook.remove()

    def _hook(self, name: str, _: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self._see(name, inputs[0])

    @abstractmethod
    def _see(self, name: str, inputs: Tensor) -> None:
        """Update the statistics with the input of one module, (..., channels)."""

    @abstractmethod
    def found(self) -> Mapping[str, S]:
        """Return the statistics by canonical name; call it once, after the last pass."""


class InputSquareSums(InputObserver[Tensor]):
    """Sum over tokens of the squared input of each linear, per input channel, float64.

    Squares are float32 by default, and sums are float64. The batch size therefore influences the
    result only as much as it influences the forward pass. With ``squares_in`` float64 the squares
    of float32 inputs are exact.
    """

    def __init__(
        self, linears: dict[str, nn.Linear], *, squares_in: torch.dtype = torch.float32
    ) -> None:
        super().__init__(linears)
        self._squares_in = squares_in
        self.sums: dict[str, Tensor] = {
            name: torch.zeros(linear.in_features, dtype=torch.float64, device=linear.weight.device)
            for name, linear in linears.items()
        }

    def _see(self, name: str, inputs: Tensor) -> None:
        # Query, key and value share their input, so the last sum is reused.
        if self._last is None or inputs is not self._last[0]:
            # A few channels at a time, because torch makes a float64 copy of what it sums.
            pieces = inputs.flatten(0, -2).split(CHANNELS_AT_ONCE, dim=1)
            sums = [
                # Exact squares need float64: the square of a float32 has 48 bits.
                piece.to(self._squares_in).square().sum(dim=0, dtype=torch.float64)
                for piece in pieces
            ]
            self._last = (inputs, torch.cat(sums))
        self.sums[name] += self._last[1]

    def found(self) -> dict[str, Tensor]:
        """Return the sums by canonical linear name, (channels,) each."""
        return self.sums


class InputGrams(InputObserver[Factor]):
    """Sum over tokens of the outer product of each linear's input with itself.

    The Gram matrix is (channels, channels), float32. Linears with the same input, such as query,
    key and value, or gate and up, share one Gram matrix and one factor.
    """

    def __init__(
        self, linears: dict[str, nn.Linear], *, damping_mean: DampingMean = "live"
    ) -> None:
        super().__init__(linears)
        self.grams: dict[str, Tensor] = {}
        """Gram matrices by the name of the first linear that gets an input."""
        self._damping_mean = damping_mean
        self._leader: dict[str, str] = {}

    def _see(self, name: str, inputs: Tensor) -> None:
        # Identity, not equality: the same tensor is passed to several linears.
        is_shared = self._last is not None and inputs is self._last[0]
        leader = self._last[1] if self._last is not None and is_shared else name
        # Otherwise one Gram matrix would be missing inputs.
        if self._leader.setdefault(name, leader) != leader:
            raise RuntimeError(
                f"{name} shares its input with {leader} in one forward pass but not in another"
            )
        if not is_shared:
            self._last = (inputs, name)
            # OPT flattens samples and tokens itself.
            tokens = inputs.flatten(0, -2).to(torch.float32)
            if name not in self.grams:
                self.grams[name] = tokens.new_zeros(tokens.shape[1], tokens.shape[1])
            # X^T X of the batch, added in place.
            self.grams[name].addmm_(tokens.T, tokens)

    def found(self) -> dict[str, Factor]:
        """Return the factor of each linear's Gram matrix by name, and free the matrices."""
        # SparseGPT's published code counts a dead channel as 1 in 2 / n * X^T X, so as n / 2 here.
        dead_diagonal = self.samples / 2 if self._damping_mean == "all" else None
        factors = {
            leader: factorise(self.grams.pop(leader), dead_diagonal=dead_diagonal)
            for leader in list(self.grams)
        }
        return {name: factors[self._leader[name]] for name in self._modules}


Watch = Callable[[dict[str, nn.Linear]], InputObserver[InputStatistics]]


def watch_for(pruning: LocalPruning) -> Watch:
    """Return the class that collects the input statistics of a pruning method."""
    if pruning.metric != "sparsegpt":
        return InputSquareSums
    return partial(InputGrams, damping_mean=pruning.damping_mean)


def pack_statistics(tensors: Mapping[str, Tensor]) -> bytes:
    """Serialise named statistics of a client, float32."""
    return pack_tensors({name: value.to(torch.float32).numpy() for name, value in tensors.items()})


def read_statistics(blob: bytes) -> dict[str, Tensor]:
    """Return named statistics from a blob, float64."""
    return {
        name: torch.from_numpy(value.copy()).double()
        for name, value in unpack_tensors(blob).items()
    }
