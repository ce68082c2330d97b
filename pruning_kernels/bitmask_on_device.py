"""Packed masks from and to tensors on a device: what ``bitmask`` does on the CPU, so that an eighth of the bytes travels."""

import numpy as np
import torch
from torch import Tensor

from pruning_kernels.bitmask import Words, num_words, pack


def pack_tensor(mask: Tensor) -> Words:
    """``bitmask.pack`` of a bool tensor of any shape, wherever it is: flat words on the host."""
    return pack(mask.numpy()) if mask.device.type == "cpu" else pack_on_device(mask)


def pack_on_device(mask: Tensor) -> Words:
    """The same in torch."""
    weights = mask.numel()
    bits = torch.zeros(num_words(weights) * 64, dtype=torch.uint8, device=mask.device)
    bits[:weights] = mask.reshape(-1)
    places = torch.arange(8, dtype=torch.uint8, device=mask.device)
    in_bytes = bits.reshape(-1, 8).bitwise_left_shift_(places).sum(dim=1, dtype=torch.uint8)
    return in_bytes.cpu().numpy().view(np.uint64)


def unpack_on_device(words: Words, weights: int, device: torch.device) -> Tensor:
    """``bitmask.unpack`` onto a device: (weights,) bool."""
    in_bytes = torch.from_numpy(words.view(np.uint8)).to(device)
    places = torch.arange(8, dtype=torch.uint8, device=device)
    return (in_bytes[:, None] >> places & 1).reshape(-1)[:weights].bool()
