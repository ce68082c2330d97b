"""Mean loss per token of the answers, for answers that are written and not chosen."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from espalier.corpora.tasks.batches import NOT_COUNTED, Counted, batches
from espalier.corpora.tasks.encoding import Encoded


@torch.no_grad()
def mean_answer_loss(
    model: Any,
    encoded: Sequence[Encoded],
    counted: Counted = "answer",
    batch_size: int = 16,
    device: torch.device | str = "cpu",
) -> tuple[float, int]:
    """Mean next-token loss in nats over all counted tokens of all items, and how many they are.

    A long answer weighs as much as its tokens. The first token of a text is never counted, as nothing predicts it.

    Parameters
    ----------
    model : called with ``input_ids`` and ``attention_mask``, returns ``logits`` (B, T, vocabulary); causal, in evaluation mode
    encoded : at least one
    """
    total, tokens = 0.0, 0
    by_length = sorted(encoded, key=lambda one: len(one.token_ids))
    for batch in batches(by_length, batch_size, 0, counted):
        logits = model(input_ids=batch.input_ids.to(device), attention_mask=batch.attention_mask.to(device)).logits
        labels = batch.labels[:, 1:].to(device)
        wanted = labels != NOT_COUNTED
        losses = nn.functional.cross_entropy(logits[:, :-1][wanted].to(torch.float32), labels[wanted], reduction="none")
        total += float(losses.to(torch.float64).sum())
        tokens += len(losses)
    return total / tokens, tokens
