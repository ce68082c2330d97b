"""Logits in pieces of tokens, so that what is in memory depends neither on windows nor on the vocabulary."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

LOGITS_AT_ONCE = 1 << 24
"""Numbers: 64 MiB in float32, or 524 tokens of 32000 words. Smaller products of the head may round otherwise."""


def tokens_at_once(vocabulary: int) -> int:
    """For how many tokens logits are made together."""
    return max(1, LOGITS_AT_ONCE // vocabulary)


@torch.no_grad()
def logits_at(
    model: Any, input_ids: Tensor, attention_mask: Tensor | None, places: Tensor
) -> Iterator[Tensor]:
    """Logits of a whole language model at some places of its input.

    The model's own code runs, and its head is given nothing; then the head gets the hidden states that were meant for it, those
    of the places alone.

    Parameters
    ----------
    model : one of Hugging Face's with a language-model head, in evaluation mode
    input_ids, attention_mask : (B, T), int64, on the model's device; no mask where no token is padding
    places : (B, T), bool

    Yields
    ------
    (tokens, vocabulary), of as many tokens as ``tokens_at_once`` says: the places of the first row, then those of the next
    """
    head = model.get_output_embeddings()
    wanted: list[Tensor] = []

    def take(_: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        wanted.append(inputs[0][places])
        return (inputs[0][:, :0], *inputs[1:])

    hook = head.register_forward_pre_hook(take)
    try:
        model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)
    finally:
        hook.remove()
    (hidden,) = wanted
    for piece in hidden.split(tokens_at_once(head.out_features)):
        yield head(piece)
