"""The signals of a dense model at its norms: second moments block after block, and the bases that they lead to.

A signal is what a norm gives but for its scale (section 3.3), so the squares of one token's signal sum to the width at most.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from espalier.hf.stream.block_stream import BlockStream
from espalier.messages.payload import pack_tensors, unpack_tensors
from espalier.methods.slicegpt.contract import BASIS, MOMENTS
from espalier.progress.beats import beats
from pruning_kernels.groups.slicing import (
    kept_share,
    normalised,
    packed,
    principal_basis,
    second_moments,
)

NORMS = ("norm.attn", "norm.mlp")
"""Norms of a block, in the order in which it uses them."""


class _Watched:
    """Forward hook of a norm: sums the second moments of its signals."""

    def __init__(self, epsilon: float) -> None:
        self.moments: Tensor | None = None
        self._epsilon = epsilon

    def __call__(self, norm: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        """(windows, tokens, width)."""
        seen = second_moments(normalised(inputs[0].flatten(0, -2), self._epsilon))
        self.moments = seen if self.moments is None else self.moments.add_(seen)


@torch.no_grad()
def mean_moments(stream: BlockStream, windows: Tensor) -> Iterator[Tensor]:
    """Second moments of one party's signals, place after place of the dense model, as means over tokens.

    Parameters
    ----------
    windows : (windows, tokens), int64

    Yields
    ------
    (width, width), float64, on the CPU: before attention and feed-forward part of each block, and before the head
    """
    activations = stream.start(windows)
    family = stream.model.family
    epsilon = float(stream.model.configured("rms_norm_eps"))
    for block_plan in beats(stream.model.plan.blocks, "watching block"):
        index = block_plan.index
        watched = [_Watched(epsilon) for _ in NORMS]
        with stream.block(index, following=index + 1) as block, ExitStack() as hooks:
            for name, own in zip(NORMS, watched, strict=True):
                hooks.callback(_hooked(block.get_submodule(family.norms[name]), own).remove)
            activations.through(index, block)
        yield from (_mean(own, windows) for own in watched)
    behind = _Watched(epsilon)
    for batch in activations.batches():
        behind(nn.Identity(), (batch,))
    yield _mean(behind, windows)


def _hooked(norm: nn.Module, watched: _Watched) -> Any:
    return norm.register_forward_pre_hook(watched)


def _mean(watched: _Watched, windows: Tensor) -> Tensor:
    assert watched.moments is not None
    return watched.moments.cpu() / windows.numel()


def basis_of(moments: Tensor, width: int) -> tuple[Tensor, float]:
    """The basis of a place, (hidden size, width), float32, and which share of the signals' squared length lies in it."""
    basis = principal_basis(moments, width)
    return basis.to(torch.float32), kept_share(moments, basis)


def pack_moments(moments: Tensor) -> bytes:
    """Serialise those of a place: their upper triangle, float32."""
    return pack_tensors({MOMENTS: packed(moments).to(torch.float32).numpy()})


def read_moments(blob: bytes) -> Tensor:
    """Their upper triangle, float64."""
    return torch.from_numpy(unpack_tensors(blob)[MOMENTS].copy()).to(torch.float64)


def pack_basis(basis: Tensor) -> bytes:
    """Serialise the basis of a place, float32."""
    return pack_tensors({BASIS: basis.numpy()})


def read_basis(blob: bytes) -> Tensor:
    """Read it, (hidden size, width), float32."""
    return torch.from_numpy(unpack_tensors(blob)[BASIS].copy())
