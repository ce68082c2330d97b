"""Training sequences of a client, their order and batches.

It is a function of seed and step, so training can continue on any machine without stored state.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from espalier.data.client_items import client_items
from espalier.data.client_text import training_samples
from espalier.data.data_protection import told_at_the_site
from espalier.data.tasks.catalogue import task_named
from espalier.data.tasks.encoding import Encoded, encode_pair, prompt_encoder
from espalier.data.tasks.item import Batch, Item, collate, collate_texts, require_padding
from espalier.data.tasks.scored_items import cut
from espalier.data.token_pieces import Encode
from espalier.hf.opening.opened import OpenedModel
from espalier.progress import with_progress
from espalier.seeds import derive_seed
from espalier.settings.node import NodeSettings
from espalier.settings.run import RunSettings
from espalier.settings.task import TEXT


class Sequences(Protocol):
    """Training sequences of one party."""

    def __len__(self) -> int: ...

    def batch(self, numbers: Sequence[int]) -> Batch:
        """Return a batch of some sequences, padded on the right."""

    def joined(self, other: Any) -> "Sequences":
        """Return these sequences followed by another party's, of the same kind."""


@dataclass(frozen=True)
class TokenSequences:
    """Encoded items for a language model."""

    encoded: tuple[Encoded, ...]

    def __len__(self) -> int:
        return len(self.encoded)

    def batch(self, numbers: Sequence[int]) -> Batch:
        """Return a batch of some sequences, padded on the right."""
        return collate([self.encoded[number] for number in numbers], 0)

    def joined(self, other: "TokenSequences") -> "TokenSequences":
        """Return these sequences followed by another party's."""
        return TokenSequences(self.encoded + other.encoded)


@dataclass(frozen=True)
class TextSequences:
    """Samples of text for a language model; every token counts."""

    samples: tuple[Tensor, ...]
    """Samples of each party: (samples, tokens), int64."""

    def __len__(self) -> int:
        return sum(map(len, self.samples))

    def batch(self, numbers: Sequence[int]) -> Batch:
        """Return a batch of some samples, which all have one length."""
        return collate([self._encoded(number) for number in numbers], 0)

    def _encoded(self, number: int) -> Encoded:
        for samples in self.samples:
            if number < len(samples):
                return Encoded(tuple(samples[number].tolist()), samples.shape[1])
            number -= len(samples)
        raise IndexError("there is no such sample")

    def joined(self, other: "TextSequences") -> "TextSequences":
        """Return these samples followed by another party's."""
        return TextSequences(self.samples + other.samples)


@dataclass(frozen=True)
class ClassSequences:
    """Texts or pairs of texts for an encoder, with their classes."""

    items: tuple[Item, ...]
    tokenizer: Any
    max_tokens: int

    def __len__(self) -> int:
        return len(self.items)

    def batch(self, numbers: Sequence[int]) -> Batch:
        """Return a batch of some items, padded on the right."""
        return collate_texts(
            [self.items[number] for number in numbers], self.tokenizer, self.max_tokens
        )

    def joined(self, other: "ClassSequences") -> "ClassSequences":
        """Return these items followed by another party's."""
        return ClassSequences(self.items + other.items, self.tokenizer, self.max_tokens)


@told_at_the_site
def client_sequences(
    settings: RunSettings, node: NodeSettings, model: OpenedModel, client: int
) -> Sequences:
    """Return a client's training sequences.

    They are all samples of its text, of which every token counts, or its items of the task.

    Raises
    ------
    InputError
        The source or file is wrong, or there is nothing to train on.
    """
    chosen = settings.task
    if chosen.name == TEXT:
        return TextSequences((training_samples(settings, node, model.encode, client),))
    train, _ = client_items(settings, node, client)
    if model.family.kind == "encoder":
        require_padding(model.tokenizer)
        return ClassSequences(tuple(train), model.tokenizer, chosen.max_tokens)
    encode = prompt_encoder(model.tokenizer, model.encode)
    items = with_progress(train, "tokenising items")
    end = model.tokenizer.eos_token_id
    return TokenSequences(tuple(_encoded(settings, encode, end, item) for item in items))


def _encoded(settings: RunSettings, encode: Encode, end: int | None, item: Item) -> Encoded:
    """Encode an item's prompt and correct answer as they are scored.

    A written answer is followed by ``end``, the end-of-text token, so that the model learns to
    stop. One of several options is not, because only the option is scored.
    """
    task = task_named(settings.task.name)
    whole = encode_pair(encode, *item.requests[item.answer])
    if "acc" not in task.metrics and end is not None:
        whole = Encoded((*whole.token_ids, end), whole.answer_tokens + 1)
    return cut(whole, settings.task.max_tokens, task, item.where)


def sequences_of_step(num_sequences: int, batch: int, step: int, seed: int) -> list[int]:
    """Return the ``batch`` sequences of one step.

    Steps go through the sequences epoch by epoch, each in a random order of its own. A step can
    reach into the next epoch, or over several epochs if there are fewer sequences than ``batch``.
    """
    places = range(step * batch, (step + 1) * batch)
    orders: dict[int, list[int]] = {}
    for epoch in {place // num_sequences for place in places}:
        generator = np.random.default_rng(derive_seed(seed, "order", server_round=epoch))
        orders[epoch] = generator.permutation(num_sequences).tolist()
    return [orders[place // num_sequences][place % num_sequences] for place in places]


def numbered(numbers: Sequence[int]) -> Batch:
    """Return a batch whose inputs and labels are sample numbers, one label per sample."""
    found = torch.tensor(numbers)
    return Batch(
        input_ids=found[:, None],
        attention_mask=torch.ones(len(numbers), 1, dtype=torch.int64),
        labels=found,
    )
