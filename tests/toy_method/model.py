"""What a vector makes of the model, at clients and at the server alike."""

import torch
from torch import Tensor

from espalier.modeling.edits import Edits, WeightEdit
from espalier.wire.payload import unpack_tensors


def scaled(blob: bytes, strength: float) -> Edits:
    """Every query matrix with its columns scaled by ``1 + strength * mean``, in float32, and back in its own dtype."""
    factor = 1 + strength * torch.from_numpy(unpack_tensors(blob)["mean"].copy())

    def scale(weight: Tensor) -> Tensor:
        return (weight.to(torch.float32) * factor).to(weight.dtype)

    def edits(_: int) -> dict[str, WeightEdit]:
        return {"attn.q": scale}

    return edits
