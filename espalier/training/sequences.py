"""Training sequences of a client, their order and batches.

The order is a function of seed and step, so training can continue without stored state.
"""

import logging
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from espalier.amounts import count
from espalier.data.client_items import client_items, held_out_items, item_groups
from espalier.data.client_text import (
    client_samples,
    held_out_samples,
    sample_groups,
    training_samples,
)
from espalier.data.data_protection import redacted_errors
from espalier.data.files.corpus_index import Indexed
from espalier.data.privacy_units import record_sequences
from espalier.data.tasks.catalogue import task_of
from espalier.data.tasks.chat_encoding import chat_sequences, template_of
from espalier.data.tasks.encoding import Encoded, Marked, encode_pair, prompt_encoder
from espalier.data.tasks.item import Batch, Item, collate, require_padding, text_tokens
from espalier.data.tasks.scored_items import cut
from espalier.data.tasks.stored_sequences import StoredSequences
from espalier.data.token_cache import cached_tokens, state_of
from espalier.errors import InputError
from espalier.hf.opening.opened_model import OpenedModel
from espalier.progress import with_progress
from espalier.seeds import derive_seed
from espalier.settings.node import NodeSettings
from espalier.settings.run import RunSettings
from espalier.settings.tables.data import OWN_TASKS
from espalier.settings.tables.task import CHAT, TEXT
from espalier.storage.client_state import private_folder
from espalier.training.packing import PackedSequences


@dataclass(frozen=True)
class Sequences:
    """Training sequences of one party or, after ``joined``, of several."""

    parts: tuple[Any, ...]
    """Items of each party: a sequence, or a tensor (samples, tokens), int64."""
    collate: Callable[[list[Any]], Batch]
    """Function that makes a batch of items, padded on the right."""
    characters: Sequence[int] = ()
    """Number of characters of each item's record, if a template surrounds it; see ``tokens``."""

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def batch(self, numbers: Sequence[int]) -> Batch:
        """Return a batch of the sequences with these numbers."""
        return self.collate([self._item(number) for number in numbers])

    def _item(self, number: int) -> Any:
        for part in self.parts:
            if number < len(part):
                return part[number]
            number -= len(part)
        raise IndexError("there is no such sequence")

    def tokens(self, numbers: Iterable[int]) -> Iterator[int]:
        """Yield the number of tokens for which each sequence counts in ``min-tokens``.

        Records count for at most as many tokens as they have characters, and once: prompts and chat
        templates, which the server chooses, are not data.
        """
        seen = set[int]()
        for number in numbers:
            # Padding does not count.
            num_tokens = int(self.batch([number]).attention_mask.sum())
            if self.characters:
                items = getattr(self._item(number), "items", ()) or (number,)
                # A record that is divided over sequences counts with the first one only.
                num_tokens = min(num_tokens, sum(self.characters[item] for item in {*items} - seen))
                seen.update(items)
            yield num_tokens

    def joined(self, other: "Sequences") -> "Sequences":
        """Return these sequences followed by another party's, of the same kind."""
        return Sequences(self.parts + other.parts, self.collate)


def encoded_sequences(encoded: Sequence[Encoded | Marked]) -> Sequences:
    """Return sequences of encoded items for a language model."""
    return Sequences((encoded,), lambda items: collate(items, 0))


def text_sequences(samples: Tensor) -> Sequences:
    """Return samples of text, (samples, tokens), int64, for a language model; all tokens count."""
    return Sequences(
        (samples,),
        lambda rows: collate([Encoded(tuple(row.tolist()), len(row)) for row in rows], 0),
    )


@redacted_errors
def client_sequences(
    settings: RunSettings, node: NodeSettings, model: OpenedModel, client: int
) -> Sequences:
    """Return a client's training sequences.

    They are all samples of its text, of which every token counts, or its items of the task. Raises
    InputError if the source or file is wrong, or there is nothing to train on.
    """
    task = settings.task
    if task.name == TEXT:
        return text_sequences(training_samples(settings, node, model.encode, client))
    train, _ = client_items(settings, node, client)
    make = partial(_of_items, settings, node, model, train)
    if not node.keep_model:
        return make()[0]
    template = str(model.tokenizer.chat_template)
    tokenizer = (model.tokenizer_sha256, template, model.family.kind)
    key = (*tokenizer, state_of(train), task.model_dump_json())
    return cached_tokens(key, make)


def _of_items(
    settings: RunSettings, node: NodeSettings, model: OpenedModel, train: Indexed[Item]
) -> tuple[Sequences, int]:
    """Encode a client's training items; return the sequences and their number of tokens."""
    task = settings.task
    with_template = task.name == CHAT or task.name in OWN_TASKS
    characters = array("q")

    def items() -> Iterator[Item]:
        for item in with_progress(train, "tokenising items"):
            if with_template:
                characters.append(item.own_characters or len(item.text))
            yield item

    folder = partial(private_folder, node.state_root())
    if model.family.kind == "encoder":
        classified = _classified(settings, model, items(), folder)
        collate_classes = partial(_class_batch, pad_token=model.tokenizer.pad_token_id)
        sequences = Sequences((classified,), collate_classes, characters)
        return sequences, classified.texts.num_tokens
    if task.name == CHAT:
        encoded: Iterable[Encoded | Marked] = _conversations(settings, model, items())
    else:
        encoded = _answers(settings, model, items())
    stored = StoredSequences(encoded, folder)
    if not stored:
        raise InputError(
            f"task.max-tokens = {task.max_tokens}: no conversation of the client has a token of"
            " an answer within this number of tokens; raise it"
        )
    rows = PackedSequences(stored, task.max_tokens) if task.packing else stored
    return replace(encoded_sequences(rows), characters=characters), stored.num_tokens


@dataclass(frozen=True)
class _ClassifiedTexts(Sequence[tuple[Marked, int]]):
    """Texts with their classes, for an encoder."""

    texts: StoredSequences
    classes: Sequence[int]

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, place: Any) -> Any:
        return self.texts[place], self.classes[place]


def _classified(
    settings: RunSettings, model: OpenedModel, items: Iterable[Item], folder: Callable[[], Path]
) -> _ClassifiedTexts:
    """Encode texts or pairs of texts with their classes.

    Raises InputError if the tokenizer has no padding token.
    """
    require_padding(model.tokenizer)
    classes = array("q")

    def texts() -> Iterator[Marked]:
        for item in items:
            classes.append(item.answer)
            yield Marked(text_tokens(item, model.tokenizer, settings.task.max_tokens), ())

    return _ClassifiedTexts(StoredSequences(texts(), folder), classes)


def _class_batch(rows: Sequence[tuple[Marked, int]], pad_token: int) -> Batch:
    """Return a batch for an encoder, with classes as labels."""
    batch = collate([text for text, _ in rows], pad_token)
    return replace(batch, labels=torch.tensor([number for _, number in rows]))


def _answers(settings: RunSettings, model: OpenedModel, items: Iterable[Item]) -> Iterator[Encoded]:
    """Encode items' prompts and correct answers as they are scored.

    A written answer is followed by the end-of-text token, so that the model learns to stop. One of
    several options is not, because only the option is scored.
    """
    task = task_of(settings)
    encode = prompt_encoder(model.tokenizer, model.encode)
    end = None if "acc" in task.metrics else model.tokenizer.eos_token_id
    for item in items:
        encoded = encode_pair(encode, *item.requests[item.answer])
        if end is not None:
            encoded = Encoded((*encoded.token_ids, end), encoded.answer_tokens + 1)
        yield cut(encoded, settings.task.max_tokens, task, item.where)


def _conversations(
    settings: RunSettings, model: OpenedModel, items: Iterable[Item]
) -> Iterator[Marked]:
    """Encode conversations, cut at their end; those without a loss are left out."""
    task = settings.task
    template = template_of(task)
    number_of_all = left_out = 0
    for number, item in enumerate(items):
        for sequence in chat_sequences(model, item, template):
            number_of_all += 1
            short = sequence.shortened(task.max_tokens)
            if short.has_loss:
                yield replace(short, items=(number,))
            else:
                left_out += 1
    if 0 < left_out < number_of_all:
        logging.getLogger("espalier").warning(
            "%d of %d training sequences have no token of an answer within task.max-tokens = %d"
            " and are left out", left_out, number_of_all, task.max_tokens
        )  # fmt: skip


def sequence_groups(
    settings: RunSettings, node: NodeSettings, model: OpenedModel, client: int
) -> list[set[int]] | np.ndarray:
    """Return the groups of ``data-group`` that each of ``client_sequences`` is from.

    Returns
    -------
    list of sets of numbers, or an array of shape ``(sequences, 1)``
    """
    if settings.task.name == TEXT:
        return sample_groups(settings, node, model.encode, client, drawn=False)
    groups = item_groups(settings, node, client)
    encoder = model.family.kind == "encoder"
    if encoder or not (settings.task.name == CHAT or settings.task.packing):
        return groups[:, None]
    (sequences,) = client_sequences(settings, node, model, client).parts
    return [
        set(groups[list(sequence.items or (number,))].tolist())
        for number, sequence in enumerate(sequences)
    ]


def sequences_of_step(num_sequences: int, batch: int, step: int, seed: int) -> list[int]:
    """Return the ``batch`` sequences of one step.

    Steps go through the sequences epoch by epoch, each in a random order of its own. A step can
    reach into the next epoch, or over several epochs if there are fewer sequences than ``batch``.
    """
    positions = range(step * batch, (step + 1) * batch)
    orders: dict[int, list[int]] = {}
    # A new order in each epoch, from seed and epoch alone.
    for epoch in {position // num_sequences for position in positions}:
        generator = np.random.default_rng(derive_seed(seed, "order", server_round=epoch))
        orders[epoch] = generator.permutation(num_sequences).tolist()
    return [orders[position // num_sequences][position % num_sequences] for position in positions]


def sequences_of_steps(
    num_sequences: int, batch: int, steps: Iterable[int], seed: int
) -> Iterator[int]:
    """Yield the numbers of the sequences that some steps use, each once."""
    seen = set[int]()
    for step in steps:
        for number in sequences_of_step(num_sequences, batch, step, seed):
            if number not in seen:
                seen.add(number)
                yield number
        if len(seen) == num_sequences:
            return


def numbered(numbers: Sequence[int]) -> Batch:
    """Return a batch whose inputs and labels are sample numbers, one label per sample."""
    labels = torch.tensor(numbers)
    return Batch(
        input_ids=labels[:, None],
        attention_mask=torch.ones(len(numbers), 1, dtype=torch.int64),
        labels=labels,
    )


def read_client_data(
    settings: RunSettings, node: NodeSettings, model: OpenedModel, client: int
) -> list[str]:
    """Read a client's data as its rounds will, and describe it.

    The description is for the data's owner and must not be sent.

    Raises
    ------
    InputError
        The data cannot be used; the error is the one that the round would raise.
    """
    tokens = settings.data.sequence_length
    on_text = not settings.tunes or settings.task.name == TEXT
    if settings.privacy.on and on_text:
        number = len(record_sequences(settings, node, model.encode, client))
        lines = [f"{count(number, 'record or group', 'records or groups')}, for a private run"]
    elif not settings.tunes:
        number = len(client_samples(settings, node, model.encode, client))
        lines = [f"{count(number, 'calibration sample')} of {tokens} tokens"]
    else:
        number = len(client_sequences(settings, node, model, client))
        of_what = f"{tokens} tokens" if on_text else f"the task {settings.task.name}"
        lines = [f"{count(number, 'training sequence')} of {of_what}"]
    if not settings.evaluation.own_text:
        return lines
    if on_text:
        number = len(held_out_samples(settings, node, model.encode, client))
        length = settings.evaluation.sequence_length
        return [*lines, f"{count(number, 'held-out sample')} of {length} tokens"]
    items = held_out_items(settings, node, model, client)
    return [*lines, count(len(items), "held-out item")]
