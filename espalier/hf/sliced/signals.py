"""Second moments of a dense model's signals at its norms, and the bases that follow from them.

A signal is the output of a norm without its scale (SliceGPT section 3.3). The squares of one
token's signal therefore sum to at most the hidden size.
"""

from collections.abc import Iterator
from contextlib import ExitStack

import torch
from torch import Tensor, nn

from espalier.hf.stream.block_stream import BlockStream
from espalier.progress import beats
from pruning_kernels.groups.slicing import (
    kept_share,
    normalised,
    principal_basis,
    second_moments,
)

NORMS = ("norm.attn", "norm.mlp")
"""Norms of a block, in order of use."""


class _Watched:
    """Forward pre-hook of a norm that sums the second moments of its signals."""

    def __init__(self, epsilon: float) -> None:
        self.moments: Tensor | None = None
        self._epsilon = epsilon

    def __call__(self, norm: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        """Add the signals of an input of shape (batch, sequence_length, hidden_size)."""
        # Over all tokens of a batch at once.
        seen = second_moments(normalised(inputs[0].flatten(0, -2), self._epsilon))
        self.moments = seen if self.moments is None else self.moments.add_(seen)


@torch.no_grad()
def mean_moments(stream: BlockStream, samples: Tensor) -> Iterator[Tensor]:
    """Yield the second moments of one client's signals in the dense model, as means over tokens.

    They are (hidden_size, hidden_size), float64, on the CPU: before attention and feed-forward part
    of each block, and before the head. ``samples`` are (num_samples, sequence_length), int64.
    """
    activations = stream.start(samples)
    family = stream.model.family
    epsilon = float(stream.model.configured("rms_norm_eps"))
    for block_plan in beats(stream.model.plan.blocks, "watching block"):
        index = block_plan.index
        # One sum per norm of the block.
        watched = [_Watched(epsilon) for _ in NORMS]
        with stream.block(index, following=index + 1) as block, ExitStack() as hooks:
            for name, own in zip(NORMS, watched, strict=True):
                norm = block.get_submodule(family.norms[name])
                hooks.callback(norm.register_forward_pre_hook(own).remove)
            activations.through(index, block)
        yield from (_mean(own, samples) for own in watched)
    # The input of the head passes the final norm, so its signals are normalised in the same way.
    behind = _Watched(epsilon)
    for batch in activations.batches():
        behind(nn.Identity(), (batch,))
    yield _mean(behind, samples)


def _mean(watched: _Watched, samples: Tensor) -> Tensor:
    assert watched.moments is not None
    # A mean: clients with different numbers of samples are weighted by the server.
    return watched.moments.cpu() / samples.numel()


def basis_of(moments: Tensor, width: int) -> tuple[Tensor, float]:
    """Return the basis of a place, and the fraction of the signals' squared length that it keeps.

    ``moments`` are (hidden_size, hidden_size), and the basis is (hidden_size, width), float32.
    """
    basis = principal_basis(moments, width)
    # The fraction is computed with the basis before rounding.
    return basis.to(torch.float32), kept_share(moments, basis)
