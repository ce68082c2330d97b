"""Loss of a training step: a sum over a batch's predictions, which the loop averages over the step.

A method can replace cross entropy, for instance by the distance from a teacher's logits. Such a
loss must keep this contract:

- It is a sum over the batch's counted predictions of about 0.001 to 1000 each, as a loss in nats.
  The loop divides by their number and clips gradients only from above. AdamW adds 1e-8 to the
  gradient's size before it divides by it, so the gradients of a much smaller loss would not be
  normalised and could be read from the update.
- It depends on nothing but the model and the batch. A step counts as having used its sequences
  (``Trained.weighed``, on which a site's ``min-tokens`` is based) if the loss has a gradient. A
  term that does not depend on the batch would have one without them; it belongs in the loop's
  ``penalty``.
- No prediction counts much more than another: a loss with weights bounds them.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from espalier.data.tasks.item import NOT_COUNTED, Batch

Loss = Callable[[Any, Batch, torch.device], Tensor]
"""Function of model, batch and device that returns the loss of a batch.

The model is in training mode, and the batch on the CPU. The result is summed over ``num_counted``
predictions: float32, (), with a gradient. Random numbers, as of dropout, are seeded per step and
batch.
"""


def summed_loss(model: Any, batch: Batch, device: torch.device) -> Tensor:
    """Return the cross entropy in nats, summed over the batch's counted tokens or its items."""
    return nn.functional.cross_entropy(*counted_predictions(model, batch, device), reduction="sum")


def counted_predictions(model: Any, batch: Batch, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the logits of the counted predictions, float32, and their labels, int64.

    They are (counted, vocabulary) and (counted,), or for classes (items, classes) and (items,).
    """
    kwargs: dict[str, Any] = {"attention_mask": batch.attention_mask.to(device)}
    if batch.position_ids is not None:
        # transformers finds packed records by their positions if there is neither mask nor cache.
        kwargs = {"position_ids": batch.position_ids.to(device), "use_cache": False}
    kwargs["input_ids"] = batch.input_ids.to(device)
    labels = batch.labels
    if labels.ndim == 1:
        logits = model(**kwargs).logits
    else:
        # The logits at a token predict the next one.
        is_counted = labels[:, 1:] != NOT_COUNTED
        labels = labels[:, 1:][is_counted]
        logits = _logits_where(model, nn.functional.pad(is_counted, (0, 1)), kwargs)
    return logits.to(torch.float32), labels.to(logits.device)


def _logits_where(model: Any, is_wanted: Tensor, kwargs: Mapping[str, Any]) -> Tensor:
    """Return the logits at some positions, (positions, vocabulary), in the order of the batch.

    The head is given the hidden states of these positions only, because the logits of all
    positions often need more memory than the rest of the step.

    Parameters
    ----------
    is_wanted : (B, T), bool
    """
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    # Code of ``torch.compile``, which has this attribute, may not see hooks that come and go.
    if head is None or hasattr(model, "_orig_mod"):
        logits: Tensor = model(**kwargs).logits
        return logits[is_wanted.to(logits.device)]

    def choose(_: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (inputs[0][is_wanted.to(inputs[0].device)], *inputs[1:])

    hook = head.register_forward_pre_hook(choose)
    try:
        chosen: Tensor = model(**kwargs).logits
    finally:
        hook.remove()
    return chosen


def num_counted(batch: Batch) -> int:
    """Return the number of predictions in the loss; a text's first token is never predicted."""
    if batch.labels.ndim == 1:
        return len(batch.labels)
    return int((batch.labels[:, 1:] != NOT_COUNTED).sum())
