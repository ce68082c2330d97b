"""What calibration windows tell of a linear's inputs: square sums per channel, or the gram of all channels."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from pruning_kernels.selection.local import DampingMean, InputStatistics, LocalPruning
from pruning_kernels.sparsegpt.sparsegpt import Factor, factorise

CHANNELS_AT_ONCE = 512


class Watched(ABC):
    """Watches the inputs of a block's linears while windows pass through it."""

    windows = 0
    """How many pass through the block; told before ``found`` is asked."""

    def __init__(self, linears: dict[str, nn.Linear]) -> None:
        self._linears = linears

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Learn from the inputs of every forward pass within the block."""
        hooks = [
            linear.register_forward_pre_hook(self._hook(name))
            for name, linear in self._linears.items()
        ]
        try:
            yield
        finally:
            self._forget_last()
            for hook in hooks:
                hook.remove()

    def _hook(self, name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        return lambda _, inputs: self._see(name, inputs[0])

    @abstractmethod
    def _see(self, name: str, inputs: Tensor) -> None:
        """Learn from the inputs of one linear, (..., channels)."""

    @abstractmethod
    def _forget_last(self) -> None:
        """Let the last inputs go."""

    @abstractmethod
    def found(self) -> Mapping[str, InputStatistics]:
        """What was learnt, by canonical linear name; to be asked once, after the last pass."""


class InputSquareSums(Watched):
    """Sum over tokens of each linear's squared input, per input channel, float64.

    Squares are float32, sums are float64, so the result depends on how windows are batched by no more than the forward
    pass itself does.
    """

    def __init__(self, linears: dict[str, nn.Linear]) -> None:
        super().__init__(linears)
        self.sums: dict[str, Tensor] = {
            name: torch.zeros(linear.in_features, dtype=torch.float64, device=linear.weight.device)
            for name, linear in linears.items()
        }
        self._last_input: Tensor | None = None
        self._last_sum: Tensor | None = None

    def _see(self, name: str, inputs: Tensor) -> None:
        # query, key and value share their input.
        if inputs is not self._last_input or self._last_sum is None:
            self._last_input = inputs
            self._last_sum = _square_sum(inputs)
        self.sums[name] += self._last_sum

    def _forget_last(self) -> None:
        self._last_input = self._last_sum = None

    def found(self) -> dict[str, Tensor]:
        """(channels,) per linear, by canonical name."""
        return self.sums


class InputGrams(Watched):
    """Sum over tokens of the outer product of each linear's input with itself: (channels, channels), float32.

    Linears that are given the same input have one gram and one factor together: query, key and value, or gate and up.
    """

    def __init__(
        self, linears: dict[str, nn.Linear], damping: float, damping_mean: DampingMean = "live"
    ) -> None:
        super().__init__(linears)
        self.grams: dict[str, Tensor] = {}
        """By the name of the first linear that is given an input."""
        self._damping = damping
        self._damping_mean = damping_mean
        self._leader: dict[str, str] = {}
        self._last: tuple[Tensor, str] | None = None

    def _see(self, name: str, inputs: Tensor) -> None:
        shares = self._last is not None and inputs is self._last[0]
        leader = self._last[1] if self._last is not None and shares else name
        if self._leader.setdefault(name, leader) != leader:
            raise RuntimeError(
                f"{name} shares its input with {leader} in one forward pass and not in another"
            )
        if not shares:
            self._last = (inputs, name)
            tokens = _tokens(inputs)
            if name not in self.grams:
                self.grams[name] = tokens.new_zeros(tokens.shape[1], tokens.shape[1])
            self.grams[name].addmm_(tokens.T, tokens)

    def _forget_last(self) -> None:
        self._last = None

    def found(self) -> dict[str, Factor]:
        """The factor of each linear's gram, by canonical name; the grams are used up."""
        dead = self.windows / 2 if self._damping_mean == "all" else None
        factors = {
            leader: factorise(self.grams.pop(leader), self._damping, dead)
            for leader in list(self.grams)
        }
        return {name: factors[self._leader[name]] for name in self._linears}


def _square_sum(inputs: Tensor) -> Tensor:
    """Over tokens, per channel, float64: a few channels at a time, because torch sums a copy in float64."""
    pieces = inputs.flatten(0, -2).split(CHANNELS_AT_ONCE, dim=1)
    return torch.cat(
        [piece.to(torch.float32).square().sum(dim=0, dtype=torch.float64) for piece in pieces]
    )


def _tokens(inputs: Tensor) -> Tensor:
    return inputs.flatten(0, -2).to(torch.float32)  # OPT flattens windows and tokens itself


Watch = Callable[[dict[str, nn.Linear]], Watched]


def watch_for(pruning: LocalPruning) -> Watch:
    """What has to be watched for a way of pruning."""
    if not pruning.needs_grams:
        return InputSquareSums
    return partial(InputGrams, damping=pruning.damping, damping_mean=pruning.damping_mean)
