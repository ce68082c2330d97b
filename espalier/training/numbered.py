"""Batches that name windows by their numbers, of training that reads hidden states in place of tokens."""

from collections.abc import Sequence

import torch

from espalier.corpora.tasks.batches import Batch


def numbered(numbers: Sequence[int]) -> Batch:
    """A batch that names windows by their numbers; it has as many labels as a loss is summed over."""
    found = torch.tensor(numbers)
    return Batch(
        input_ids=found[:, None],
        attention_mask=torch.ones(len(numbers), 1, dtype=torch.int64),
        labels=found,
    )
