"""Model edits from a vector, the same at clients and at the server."""

import torch
from torch import Tensor

from espalier.hf.stream.edits import Edits, WeightEdit
from espalier.messages.payload import unpack_tensors


def scaled(blob: bytes, strength: float) -> Edits:
    """Return edits that scale the columns of every query matrix by ``1 + strength * mean``.

    The product is computed in float32 and rounded to the matrix's dtype.
    """
    factor = 1 + strength * torch.from_numpy(unpack_tensors(blob)["mean"].copy())

    def scale(weight: Tensor) -> Tensor:
        return (weight.to(torch.float32) * factor).to(weight.dtype)

    def edits(_: int) -> dict[str, WeightEdit]:
        return {"attn.q": scale}

    return edits
