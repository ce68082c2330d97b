"""Item of a task: a question, its possible answers and the correct one; and batches of items."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from espalier.data.tasks.encoding import Encoded, Marked
from espalier.errors import InputError


@dataclass(frozen=True)
class Conversation:
    """Messages that a model's chat template renders."""

    messages: tuple[tuple[str, str], ...]
    """Role and content of each message."""
    first: int = 0
    """Index of the first message that may have a loss; only assistant messages have one."""


@dataclass(frozen=True)
class Item:
    """Question of a task, as the strings that a language model sees.

    A question with a written answer has this answer as its only option.
    """

    contexts: tuple[str, ...]
    """Text before the option: one for all options, or one per option (winogrande)."""
    options: tuple[str, ...]
    """Possible continuations as written, without the delimiter."""
    answer: int
    """Index of the correct option; for an encoder, the class."""
    delimiter: str = " "
    """Text between a context and an option."""
    label: str = ""
    """Class or category for the partition among clients; empty if the task has none."""
    texts: tuple[str, ...] = ()
    """Input of an encoder, a text or a pair; empty if the task is not a classification."""
    where: str = field(default="", compare=False)
    """File and line, or dataset and record, of the item, for errors."""

    question: str = ""
    """Question without the options; empty if the contexts are exactly that."""
    own_characters: int = 0
    """Number of characters that are from the record; 0: unknown, and no template is involved."""
    conversation: Conversation | None = None
    """Messages of the item if it is a conversation; context and option are then a plain text."""

    @property
    def text(self) -> str:
        """Question without its options, whose hash decides the partition and the held-out split.

        Options are left out, so that a question with other options or another answer is on the same
        side.
        """
        return self.question or "\n".join(self.contexts)

    @property
    def requests(self) -> tuple[tuple[str, str], ...]:
        """Context and continuation of every option; the continuation begins with the delimiter."""
        contexts = self.contexts if len(self.contexts) > 1 else self.contexts * len(self.options)
        return tuple(
            (context, self.delimiter + option)
            for context, option in zip(contexts, self.options, strict=True)
        )

    @property
    def prompt(self) -> str:
        """Context of the correct option."""
        return self.requests[self.answer][0]

    @property
    def gold(self) -> str:
        """Correct option, as written."""
        return self.options[self.answer]


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
    position_ids: Tensor | None = None
    """(B, T), int64: positions that begin at 0 with every packed record; None if none is packed.

    A model that is given these and no attention mask attends within each record only.
    """


def collate(encoded: Sequence[Encoded | Marked], pad_token: int) -> Batch:
    """Return a batch with the length of its longest item, and labels within the items' spans."""
    shape = len(encoded), max(len(one.token_ids) for one in encoded)
    input_ids = torch.full(shape, pad_token, dtype=torch.int64)
    attention_mask = torch.zeros(shape, dtype=torch.int64)
    labels = torch.full(shape, NOT_COUNTED, dtype=torch.int64)
    for row, one in enumerate(encoded):
        length = len(one.token_ids)
        input_ids[row, :length] = torch.tensor(one.token_ids, dtype=torch.int64)
        attention_mask[row, :length] = 1
        for start, end in one.spans:
            labels[row, start:end] = input_ids[row, start:end]
    if not any(one.lengths for one in encoded):
        return Batch(input_ids, attention_mask, labels)
    return Batch(input_ids, attention_mask, labels, _positions(encoded, shape))


def _positions(encoded: Sequence[Encoded | Marked], shape: tuple[int, int]) -> Tensor:
    """Return positions that begin again with every record, and with the padding."""
    positions = torch.zeros(shape, dtype=torch.int64)
    for row, one in zip(positions, encoded, strict=True):
        lengths = one.lengths or (len(one.token_ids),)
        padding = shape[1] - len(one.token_ids)
        row[:] = torch.cat([torch.arange(length) for length in (*lengths, padding)])
    return positions


def require_padding(tokenizer: Any) -> None:
    """Refuse a tokenizer that cannot pad the texts of a batch.

    Raises InputError if the tokenizer has no padding token.
    """
    if tokenizer.pad_token_id is None:
        raise InputError(
            "the tokenizer has no padding token, and an encoder needs one to make the texts of"
            " a batch equally long; set pad_token in the model's tokenizer_config.json"
        )


def text_tokens(item: Item, tokenizer: Any, max_tokens: int) -> tuple[int, ...]:
    """Return the token ids of an item for an encoder: of its text, or of a pair of texts.

    A pair that is longer than ``max_tokens`` loses tokens at the end of the longer text. Token
    types are left out, because RoBERTa has none.

    Parameters
    ----------
    tokenizer : tokenizer of Hugging Face
    """
    return tuple(tokenizer(*item.texts, truncation=True, max_length=max_tokens)["input_ids"])
