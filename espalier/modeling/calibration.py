"""One party prunes a model with its calibration windows, block by block (the procedure of Wanda, Sun et al. 2023, section 3).

Per block: one pass of all windows through the dense block gathers the input norms of its linears; then all its linears
are pruned; then the windows pass through the pruned block, so that the next block sees what it would see in the pruned
model.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from espalier.modeling.block_stream import Activations, BlockStream, apply_prune_masks

ChoosePruneMask = Callable[[Tensor, Tensor], Tensor]
"""(weight, input_square_sum) -> prune mask; see ``pruning_kernels.local``."""


class InputSquareSums:
    """Sum over tokens of each linear's squared input, per input channel, float64.

    Squares are float32, sums are float64, so the result depends on how windows are batched by no more than the forward
    pass itself does.
    """

    def __init__(self, linears: dict[str, nn.Linear]) -> None:
        self.sums: dict[str, Tensor] = {
            name: torch.zeros(linear.in_features, dtype=torch.float64, device=linear.weight.device)
            for name, linear in linears.items()
        }
        self._linears = linears
        self._last_input: Tensor | None = None
        self._last_sum: Tensor | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Add up the inputs of every forward pass within the block."""
        hooks = [linear.register_forward_pre_hook(self._hook(name)) for name, linear in self._linears.items()]
        try:
            yield
        finally:
            self._last_input = self._last_sum = None
            for hook in hooks:
                hook.remove()

    def _hook(self, name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def add(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            if inputs[0] is not self._last_input or self._last_sum is None:  # query, key and value share their input
                self._last_input = inputs[0]
                squares = inputs[0].flatten(0, -2).to(torch.float32).square()  # OPT flattens windows and tokens itself
                self._last_sum = squares.sum(dim=0, dtype=torch.float64)
            self.sums[name] += self._last_sum

        return add


@torch.no_grad()
def prune_by_block(stream: BlockStream, windows: Tensor, choose: ChoosePruneMask) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """Prune every block for one party.

    Parameters
    ----------
    stream : the dense model
    windows : (windows, tokens), int64, the party's calibration windows
    choose : decides the prune mask of one matrix

    Yields
    ------
    (block index, prune masks by canonical linear name), bool, shaped like the weights
    """
    activations = stream.start(windows)
    for block_plan in stream.model.plan.blocks:
        with stream.block(block_plan.index) as block:
            masks = _choose_in_block(stream, activations, block_plan.index, block, choose)
            apply_prune_masks(stream.linears(block_plan.index, block), masks)
            activations.through(block_plan.index, block)
        yield block_plan.index, masks


@torch.no_grad()
def choose_in_dense_block(
    stream: BlockStream, activations: Activations, index: int, choose: ChoosePruneMask
) -> dict[str, Tensor]:
    """Prune masks of one block for one party, whose activations stand before it and stay there."""
    with stream.block(index) as block:
        return _choose_in_block(stream, activations, index, block, choose)


def _choose_in_block(
    stream: BlockStream, activations: Activations, index: int, block: nn.Module, choose: ChoosePruneMask
) -> dict[str, Tensor]:
    linears = stream.linears(index, block)
    norms = InputSquareSums(linears)
    with norms.watching():
        activations.through(index, block, keep=False)
    return {name: choose(linear.weight, norms.sums[name]) for name, linear in linears.items()}
