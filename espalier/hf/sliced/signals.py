"""Second moments of a dense model's signals at its norms, and the bases that follow from them.

A signal is the output of a norm without its scale (SliceGPT section 3.3). The squares of one
token's signal therefore sum to at most the hidden size.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from espalier.hf.stream.block_stream import BlockStream
from espalier.hf.stream.calibration import observed_pass
from espalier.hf.stream.input_statistics import InputObserver
from espalier.progress import report_each
from pruning_kernels.groups.slicing import (
    kept_share,
    normalised,
    principal_basis,
    second_moments,
)

NORMS = ("norm.attn", "norm.mlp")
"""Norms of a block, in order of use."""


class SignalMoments(InputObserver[Tensor]):
    """Sum over tokens of the second moments of the signals of a block's norms."""

    def __init__(self, norms: Mapping[str, nn.Module], epsilon: float) -> None:
        super().__init__(norms)
        self._epsilon = epsilon
        self._moments: dict[str, Tensor] = {}

    def _see(self, name: str, inputs: Tensor) -> None:
        """Add the signals of an input of shape (batch, sequence_length, hidden_size)."""
        # Over all tokens of a batch at once.
        moments = second_moments(normalised(inputs.flatten(0, -2), self._epsilon))
        self._moments[name] = (
            self._moments[name].add_(moments) if name in self._moments else moments
        )

    def found(self) -> dict[str, Tensor]:
        """Return the sums by canonical name of the norm, (hidden_size, hidden_size) each."""
        return self._moments


@torch.no_grad()
def mean_moments(stream: BlockStream, samples: Tensor) -> Iterator[Tensor]:
    """Yield the second moments of one client's signals in the dense model, as means over tokens.

    They are (hidden_size, hidden_size), float64, on the CPU: before attention and feed-forward part
    of each block, and before the head. ``samples`` are (num_samples, sequence_length), int64.
    """
    activations = stream.start(samples)
    family = stream.model.family
    epsilon = float(stream.model.configured("rms_norm_eps"))
    for block_plan in report_each(stream.model.plan.blocks, "watching block"):
        index = block_plan.index
        with stream.block(index, following=index + 1) as block:
            norms = {name: block.get_submodule(family.norms[name]) for name in NORMS}
            observer = SignalMoments(norms, epsilon)
            moments = observed_pass(activations, index, block, observer, keep=True)
        # A mean: clients with different numbers of samples are weighted by the server.
        yield from (moments[name].cpu() / samples.numel() for name in NORMS)
    # The input of the head passes the final norm, so its signals are normalised in the same way.
    observer = SignalMoments({}, epsilon)
    for batch in activations.batches():
        observer._see("norm.final", batch)
    yield observer.found()["norm.final"].cpu() / samples.numel()


def basis_of(moments: Tensor, width: int) -> tuple[Tensor, float]:
    """Return the basis of a place, and the fraction of the signals' squared length that it keeps.

    ``moments`` are (hidden_size, hidden_size), and the basis is (hidden_size, width), float32.
    """
    basis = principal_basis(moments, width)
    # The fraction is computed with the basis before rounding.
    return basis.to(torch.float32), kept_share(moments, basis)
