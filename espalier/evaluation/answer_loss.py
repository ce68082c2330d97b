"""Mean loss per token of the answers, for answers that are written and not chosen."""

from collections.abc import Sequence
from typing import Any

import torch

from espalier.corpora.tasks.batches import NOT_COUNTED, Counted, batches
from espalier.corpora.tasks.encoding import Encoded
from espalier.evaluation.perplexity import token_losses
from espalier.modeling.logits import logits_at


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
    model : causal, with a language-model head, in evaluation mode; see ``logits_at``
    encoded : at least one
    """
    total, tokens = 0.0, 0
    by_length = sorted(encoded, key=lambda one: len(one.token_ids))
    for batch in batches(by_length, batch_size, 0, counted):
        following = batch.labels.roll(-1, dims=1)
        following[:, -1] = NOT_COUNTED
        places = following != NOT_COUNTED
        labels, found = following[places].to(device), []
        for logits in logits_at(model, batch.input_ids.to(device), batch.attention_mask.to(device), places.to(device)):
            wanted, labels = labels.split((len(logits), len(labels) - len(logits)))
            found.append(token_losses(logits, wanted))
        losses = torch.cat(found)
        total += float(losses.to(torch.float64).sum())
        tokens += len(losses)
    return total / tokens, tokens
