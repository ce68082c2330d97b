"""Tensors of a checkpoint in pieces, so that one that is converted is never in memory twice."""

from collections.abc import Iterator

import torch
from torch import Tensor

from espalier.hf.files.checkpoint import Checkpoint
from espalier.hf.files.dtypes import TORCH_DTYPES


def pieces(checkpoint: Checkpoint, name: str) -> Iterator[Tensor]:
    """One tensor in row-major order, flat, in its own dtype, at most 16 MiB at a time: 64 elements times a whole number."""
    dtype = TORCH_DTYPES[checkpoint.tensors[name].dtype]
    for chunk in checkpoint.chunks(name):
        yield torch.frombuffer(bytearray(chunk), dtype=dtype)


def converted(
    checkpoint: Checkpoint, name: str, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """One tensor in another dtype on a device; beside the result no more than a piece of it is in memory."""
    result = torch.empty(checkpoint.tensors[name].shape, dtype=dtype, device=device)
    flat = result.view(-1)
    start = 0
    for piece in pieces(checkpoint, name):
        flat[start : start + piece.numel()] = piece.to(device)
        start += piece.numel()
    return result
