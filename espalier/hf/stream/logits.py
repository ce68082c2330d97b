"""Logits in pieces of tokens, so that memory does not grow with samples or vocabulary."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

LOGITS_AT_ONCE = 1 << 24
"""Maximum number of logits per piece: 64 MiB in float32, or 524 tokens for a vocabulary of 32000.

Smaller matrix products in the head may round differently.
"""


def tokens_at_once(vocabulary: int) -> int:
    """Return the number of tokens per piece of logits."""
    return max(1, LOGITS_AT_ONCE // vocabulary)


@torch.no_grad()
def logits_at(
    model: Any, input_ids: Tensor, attention_mask: Tensor | None, places: Tensor
) -> Iterator[Tensor]:
    """Yield the logits of a whole language model at some positions of its input.

    The model's own forward pass runs with an empty input for its head. Then the head is called with
    the hidden states of the requested positions only.

    Parameters
    ----------
    model : Hugging Face model with a language-model head, in evaluation mode
    input_ids, attention_mask : (B, T), int64, on the model's device; the mask is None if no token
        is padding
    places : (B, T), bool, the positions

    Yields
    ------
    Tensor
        (tokens, vocab_size), with up to ``tokens_at_once`` tokens: the positions of the first row,
        then those of the next
    """
    head = model.get_output_embeddings()
    wanted: list[Tensor] = []

    def take(_: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        wanted.append(inputs[0][places])
        # With an empty input, the head computes no logits in the full forward pass.
        return (inputs[0][:, :0], *inputs[1:])

    hook = head.register_forward_pre_hook(take)
    try:
        model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)
    finally:
        hook.remove()
    (hidden,) = wanted
    for piece in hidden.split(tokens_at_once(head.out_features)):
        yield head(piece)
