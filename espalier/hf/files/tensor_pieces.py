"""Tensors of a checkpoint in pieces, so that a conversion never holds a tensor twice."""

from collections.abc import Iterator

import torch
from torch import Tensor

from espalier.hf.files.checkpoint import Checkpoint
from espalier.hf.files.dtypes import TORCH_DTYPES


def pieces(checkpoint: Checkpoint, name: str) -> Iterator[Tensor]:
    """Yield one tensor in flat pieces of at most 16 MiB, in row-major order and in its own dtype.

    If the rows of a matrix have a multiple of 64 elements, so have all its pieces.
    """
    dtype = TORCH_DTYPES[checkpoint.tensors[name].dtype]
    for chunk in checkpoint.chunks(name):
        # ``bytearray``: torch wants memory that it may write.
        yield torch.frombuffer(bytearray(chunk), dtype=dtype)


def converted(
    checkpoint: Checkpoint, name: str, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return one tensor in another dtype on a device.

    In addition to the result, only one piece is in memory.
    """
    result = torch.empty(checkpoint.tensors[name].shape, dtype=dtype, device=device)
    flat = result.view(-1)
    start = 0
    for piece in pieces(checkpoint, name):
        flat[start : start + piece.numel()] = piece.to(device)
        start += piece.numel()
    return result
