"""What a training step minimises: a sum over the predictions of a batch, of which the loop takes the mean over a whole step.

A method may hand the loop another loss than cross entropy, for instance the distance from a teacher's logits. What such a loss
keeps, so that what the loop promises still holds:

- It is a sum over the batch's counted predictions, in nats or of their order, that is, about 0.001 to 1000 for each. The loop
  divides by how many they are and clips gradients from above, never from below; AdamW adds 1e-8 to a gradient's size before it
  divides by it, so that the gradients of a far smaller loss would be sent as they are.
- All of it comes from the batch. A step counts as one that read its sequences (``Trained.weighed``, on which a site's
  ``least-tokens`` rests) where the loss has any gradient. A term that knows nothing of the batch would have one without them;
  it belongs into the loop's ``penalty``.
- No prediction counts for much more than another: what weighs predictions bounds the weights.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from espalier.corpora.tasks.batches import NOT_COUNTED, Batch

Loss = Callable[[Any, Batch, torch.device], Tensor]
"""Of the model in training mode, a batch on the CPU and the device: the loss summed over ``num_counted`` predictions, float32,
(), with a gradient. It is called under the random numbers of the step and batch, which dropout draws from."""


def summed_loss(model: Any, batch: Batch, device: torch.device) -> Tensor:
    """Cross entropy in nats, summed over the batch's counted tokens, or over its items where labels are classes."""
    return nn.functional.cross_entropy(*counted_predictions(model, batch, device), reduction="sum")


def counted_predictions(model: Any, batch: Batch, device: torch.device) -> tuple[Tensor, Tensor]:
    """What a model predicts at the places that count, and what is there.

    Parameters
    ----------
    model : as of Hugging Face; called with ``input_ids`` and ``attention_mask``, returns ``logits``

    Returns
    -------
    logits (counted, vocabulary), float32, and labels (counted,), int64; or (items, classes) and the items' classes
    """
    logits = model(
        input_ids=batch.input_ids.to(device), attention_mask=batch.attention_mask.to(device)
    ).logits
    labels = batch.labels.to(device)
    if labels.ndim == 2:
        wanted = labels[:, 1:] != NOT_COUNTED
        logits = logits[:, :-1][wanted]
        labels = labels[:, 1:][wanted]
    return logits.to(torch.float32), labels


def num_counted(batch: Batch) -> int:
    """Predictions over which the loss is taken; the first token of a text is never predicted."""
    return (
        len(batch.labels)
        if batch.labels.ndim == 1
        else int((batch.labels[:, 1:] != NOT_COUNTED).sum())
    )
