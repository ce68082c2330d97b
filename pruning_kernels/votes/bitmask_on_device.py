"""Packing and unpacking of masks on a CUDA device, to transfer an eighth of the bytes."""

import numpy as np
import torch
from torch import Tensor

from pruning_kernels.votes.bitmask import Words, num_words, pack


def pack_tensor(mask: Tensor) -> Words:
    """Pack a bool tensor of any shape and device into flat words on the host."""
    return pack(mask.numpy()) if mask.device.type == "cpu" else pack_on_device(mask)


def pack_on_device(mask: Tensor) -> Words:
    """Pack a bool tensor with torch operations on its device."""
    weights = mask.numel()
    bits = torch.zeros(num_words(weights) * 64, dtype=torch.uint8, device=mask.device)
    # The last bits stay zero: padding must be clean.
    bits[:weights] = mask.reshape(-1)
    places = torch.arange(8, dtype=torch.uint8, device=mask.device)
    # (bytes, 8): bit i of a byte is weight i, little-endian.
    in_bytes = bits.reshape(-1, 8).bitwise_left_shift_(places).sum(dim=1, dtype=torch.uint8)
    return in_bytes.cpu().numpy().view(np.uint64)


def unpack_on_device(words: Words, weights: int, device: torch.device) -> Tensor:
    """Unpack words with ``bitmask.unpack`` on a device: (weights,) bool."""
    in_bytes = torch.from_numpy(words.view(np.uint8)).to(device)
    places = torch.arange(8, dtype=torch.uint8, device=device)
    return (in_bytes[:, None] >> places & 1).reshape(-1)[:weights].bool()
