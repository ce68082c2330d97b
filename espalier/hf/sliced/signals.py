"""Second moments of a dense model's signals at its norms, and the bases that follow from them.

A signal is the output of a norm without its scale (SliceGPT section 3.3). The squares of one
token's signal therefore sum to at most the hidden size.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from espalier.hf.stream.block_stream import BlockStream
from espalier.messages.tensor_blobs import pack_tensors, unpack_tensors
from espalier.methods.slicegpt import BASIS, MOMENTS
from espalier.progress import beats
from pruning_kernels.groups.slicing import (
    kept_share,
    normalised,
    packed,
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
        seen = second_moments(normalised(inputs[0].flatten(0, -2), self._epsilon))
        self.moments = seen if self.moments is None else self.moments.add_(seen)


@torch.no_grad()
def mean_moments(stream: BlockStream, samples: Tensor) -> Iterator[Tensor]:
    """Yield the second moments of one client's signals in the dense model, as means over tokens.

    Parameters
    ----------
    stream : the dense model
    samples : (num_samples, sequence_length), int64, calibration samples

    Yields
    ------
    Tensor
        (hidden_size, hidden_size), float64, on the CPU: before attention and feed-forward part of
        each block, and before the head
    """
    activations = stream.start(samples)
    family = stream.model.family
    epsilon = float(stream.model.configured("rms_norm_eps"))
    for block_plan in beats(stream.model.plan.blocks, "watching block"):
        index = block_plan.index
        watched = [_Watched(epsilon) for _ in NORMS]
        with stream.block(index, following=index + 1) as block, ExitStack() as hooks:
            for name, own in zip(NORMS, watched, strict=True):
                hooks.callback(_hooked(block.get_submodule(family.norms[name]), own).remove)
            activations.through(index, block)
        yield from (_mean(own, samples) for own in watched)
    # The input of the head passes the final norm, so its signals are normalised in the same way.
    behind = _Watched(epsilon)
    for batch in activations.batches():
        behind(nn.Identity(), (batch,))
    yield _mean(behind, samples)


def _hooked(norm: nn.Module, watched: _Watched) -> Any:
    return norm.register_forward_pre_hook(watched)


def _mean(watched: _Watched, samples: Tensor) -> Tensor:
    assert watched.moments is not None
    return watched.moments.cpu() / samples.numel()


def basis_of(moments: Tensor, width: int) -> tuple[Tensor, float]:
    """Return the basis of a place, and the fraction of the signals' squared length that it keeps.

    Parameters
    ----------
    moments : (hidden_size, hidden_size), second moments of the signals
    width : number of columns of the basis

    Returns
    -------
    tuple
        Basis, (hidden_size, width), float32; and the fraction
    """
    basis = principal_basis(moments, width)
    return basis.to(torch.float32), kept_share(moments, basis)


def pack_moments(moments: Tensor) -> bytes:
    """Serialise the upper triangle of the moments of a place, float32."""
    return pack_tensors({MOMENTS: packed(moments).to(torch.float32).numpy()})


def read_moments(blob: bytes) -> Tensor:
    """Return the upper triangle of the moments from a blob, float64."""
    return torch.from_numpy(unpack_tensors(blob)[MOMENTS].copy()).to(torch.float64)


def pack_basis(basis: Tensor) -> bytes:
    """Serialise the basis of a place, float32."""
    return pack_tensors({BASIS: basis.numpy()})


def read_basis(blob: bytes) -> Tensor:
    """Return a basis from a blob, (hidden_size, width), float32."""
    return torch.from_numpy(unpack_tensors(blob)[BASIS].copy())
