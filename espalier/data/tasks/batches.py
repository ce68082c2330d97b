"""Batches of items, padded on the right."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from espalier.data.tasks.encoding import Encoded
from espalier.data.tasks.item import Item
from espalier.errors import InputError

NOT_COUNTED = -100
"""Label of a token without a loss, as in torch's cross entropy and Hugging Face's models."""


@dataclass(frozen=True)
class Batch:
    """Input of a model with labels.

    Labels have the positions of their own tokens; the model or the loss shifts them by one.
    """

    input_ids: Tensor
    """(B, T), int64."""
    attention_mask: Tensor
    """(B, T), int64: 1 for a token, 0 for padding."""
    labels: Tensor
    """(B, T), int64, ``NOT_COUNTED`` for tokens without a loss; for an encoder the classes, (B,).
    """


def collate(encoded: Sequence[Encoded], pad_token: int) -> Batch:
    """Return a batch with the length of its longest item; the tokens of answers are counted."""
    shape = len(encoded), max(len(one.token_ids) for one in encoded)
    input_ids = torch.full(shape, pad_token, dtype=torch.int64)
    attention_mask = torch.zeros(shape, dtype=torch.int64)
    labels = torch.full(shape, NOT_COUNTED, dtype=torch.int64)
    for row, one in enumerate(encoded):
        end = len(one.token_ids)
        start = end - one.answer_tokens
        input_ids[row, :end] = torch.tensor(one.token_ids, dtype=torch.int64)
        attention_mask[row, :end] = 1
        labels[row, start:end] = input_ids[row, start:end]
    return Batch(input_ids, attention_mask, labels)


def require_padding(tokenizer: Any) -> None:
    """Refuse a tokenizer that cannot pad the texts of a batch.

    Raises
    ------
    InputError
        The tokenizer has no padding token.
    """
    if tokenizer.pad_token_id is None:
        raise InputError(
            "the tokenizer has no padding token, and an encoder needs one to make the texts of"
            " a batch equally long; set pad_token in the model's tokenizer_config.json"
        )


def collate_texts(items: Sequence[Item], tokenizer: Any, max_tokens: int) -> Batch:
    """Return a batch for an encoder: texts or pairs of texts, and their classes.

    A pair that is longer than ``max_tokens`` loses tokens at the end of the longer text.

    Parameters
    ----------
    tokenizer : tokenizer of Hugging Face with a padding token; token types are left out, because
        RoBERTa has none
    """
    texts = [list(column) for column in zip(*(item.texts for item in items), strict=True)]
    rows = tokenizer(
        *texts,
        truncation=True,
        max_length=max_tokens,
        padding=True,
        padding_side="right",
        return_tensors="pt",
    )
    return Batch(
        rows["input_ids"], rows["attention_mask"], torch.tensor([item.answer for item in items])
    )
