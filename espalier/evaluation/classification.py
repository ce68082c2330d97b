"""Accuracy of an encoder with a head for classes."""

from collections.abc import Sequence
from typing import Any

import torch

from espalier.corpora.tasks.batches import class_batches
from espalier.corpora.tasks.item import Item


@torch.no_grad()
def class_accuracy(
    model: Any, tokenizer: Any, items: Sequence[Item], max_tokens: int, batch_size: int = 32, device: torch.device | str = "cpu"
) -> float:
    """Share of the items, of which there is at least one, whose class has the highest logit; of equal ones the first counts.

    Parameters
    ----------
    model : called with ``input_ids`` and ``attention_mask``, returns ``logits`` (B, classes); in evaluation mode
    tokenizer : one of Hugging Face's, for texts and pairs of texts
    """
    by_length = sorted(items, key=lambda item: sum(map(len, item.texts)))
    right = 0
    for batch in class_batches(by_length, tokenizer, batch_size, max_tokens):
        logits = model(input_ids=batch.input_ids.to(device), attention_mask=batch.attention_mask.to(device)).logits
        predictions = logits.to(torch.float32).argmax(dim=-1).cpu()
        right += int((predictions == batch.labels).logical_and(~logits.isnan().any(dim=-1).cpu()).sum())
    return right / len(items)
