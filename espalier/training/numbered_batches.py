"""Batches of sample numbers, for training on hidden states instead of tokens."""

from collections.abc import Sequence

import torch

from espalier.data.tasks.batches import Batch


def numbered(numbers: Sequence[int]) -> Batch:
    """Return a batch whose inputs and labels are sample numbers, one label per sample."""
    found = torch.tensor(numbers)
    return Batch(
        input_ids=found[:, None],
        attention_mask=torch.ones(len(numbers), 1, dtype=torch.int64),
        labels=found,
    )
