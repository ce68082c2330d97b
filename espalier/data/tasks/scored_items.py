"""Test items as token ids: the form in which they are scored and, if public, sent."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from espalier.data.samples import Encode
from espalier.data.tasks.encoding import Encoded, encode_pair, keep_right
from espalier.data.tasks.item import Item, require_padding, text_tokens
from espalier.data.tasks.task import Task
from espalier.progress import with_progress

TEST_KEY = "task.max-test-tokens"
"""Setting for the maximum number of tokens of a test item."""


@dataclass(frozen=True)
class ScoredItems:
    """Requests of all items in order.

    A request is a context followed by one of its options, or a text to classify.
    """

    requests: tuple[Encoded, ...]
    """Token ids of each request; for a text to classify ``answer_tokens`` is 0."""
    num_options: tuple[int, ...]
    """Number of requests of each item."""
    answers: tuple[int, ...]
    """Index of the correct option of each item, or its class."""
    characters: tuple[int, ...]
    """Number of characters of each request's option, for ``acc_norm``."""
    cut: tuple[int, ...] = field(default=(), compare=False)
    """Indices of items that were too long and lost tokens; not sent."""

    def __len__(self) -> int:
        return len(self.answers)

    def options(self) -> list[tuple[Encoded, ...]]:
        """Return the requests of each item."""
        ends = np.cumsum(self.num_options)
        return [
            self.requests[end - number : end]
            for end, number in zip(ends, self.num_options, strict=True)
        ]


def scored_items(task: Task, items: Sequence[Item], encode: Encode, max_tokens: int) -> ScoredItems:
    """Encode items for a language model.

    Contexts that are too long lose their beginning, written answers their end. Raises InputError if
    an option without its context is already longer than ``max_tokens``.

    Parameters
    ----------
    encode : tokenizer that adds no token after a text, see ``special_tokens.prompt_encoder``
    """
    uncut = [
        [encode_pair(encode, *request) for request in item.requests]
        for item in with_progress(items, "tokenising test items")
    ]
    cuts = [
        [cut(one, max_tokens, task, item.where, TEST_KEY) for one in few]
        for few, item in zip(uncut, items, strict=True)
    ]
    return ScoredItems(
        tuple(one for few in cuts for one in few),
        tuple(len(item.options) for item in items),
        tuple(item.answer for item in items),
        tuple(len(option) for item in items for option in item.options),
        tuple(
            place for place, (few, left) in enumerate(zip(uncut, cuts, strict=True)) if few != left
        ),
    )


def cut(
    encoded: Encoded, max_tokens: int, task: Task, where: str = "", key: str = "task.max-tokens"
) -> Encoded:
    """Shorten a request to ``max_tokens`` tokens.

    The prompt loses its beginning; see ``cut_written`` for written answers. Raises InputError if
    one of several options has ``max_tokens`` tokens or more.

    Parameters
    ----------
    where : position of the item, for errors
    key : setting to raise, for errors
    """
    if "acc" not in task.metrics:
        return cut_written(encoded, max_tokens)
    return keep_right(encoded, max_tokens, where, key)


def cut_written(encoded: Encoded, max_tokens: int) -> Encoded:
    """Shorten a request with a written answer to ``max_tokens`` tokens.

    The prompt loses its beginning. An answer that leaves no room for the prompt loses its end, and
    the prompt keeps half of the tokens.
    """
    if encoded.answer_tokens < max_tokens:
        return Encoded(encoded.token_ids[-max_tokens:], encoded.answer_tokens)
    prompt = len(encoded.token_ids) - encoded.answer_tokens
    # The answer keeps one half of the tokens and the end of the prompt the other.
    kept = max_tokens // 2
    return Encoded(encoded.token_ids[max(0, prompt - (max_tokens - kept)) : prompt + kept], kept)


def class_items(items: Sequence[Item], tokenizer: Any, max_tokens: int) -> ScoredItems:
    """Encode items for an encoder with a classification head.

    Raises InputError if the tokenizer has no padding token.
    """
    require_padding(tokenizer)
    given = with_progress(items, "tokenising test items")
    rows = [text_tokens(item, tokenizer, max_tokens) for item in given]
    requests = tuple(Encoded(row, 0) for row in rows)
    full = [place for place, row in enumerate(rows) if len(row) == max_tokens]
    # Only a row of the full length can have lost tokens, so only these are tokenized again.
    lost = tuple(
        place
        for place in full
        if len(tokenizer(*items[place].texts, verbose=False)["input_ids"]) > max_tokens
    )
    return ScoredItems(
        requests, (1,) * len(items), tuple(item.answer for item in items), (1,) * len(items), lost
    )


def to_arrays(items: ScoredItems) -> dict[str, NDArray[np.int32]]:
    """Return flat int32 arrays that ``from_arrays`` reads."""
    return {
        "tokens": np.array([token for one in items.requests for token in one.token_ids], np.int32),
        "lengths": np.array([len(one.token_ids) for one in items.requests], np.int32),
        "answer-tokens": np.array([one.answer_tokens for one in items.requests], np.int32),
        "characters": np.array(items.characters, np.int32),
        "num-options": np.array(items.num_options, np.int32),
        "answers": np.array(items.answers, np.int32),
    }


def from_arrays(arrays: Mapping[str, NDArray[np.int32]]) -> ScoredItems:
    """Invert ``to_arrays``; ``cut`` is empty."""
    tokens = arrays["tokens"].tolist()
    ends = np.cumsum(arrays["lengths"])
    spans = zip(ends, arrays["lengths"], arrays["answer-tokens"], strict=True)
    requests = tuple(
        Encoded(tuple(tokens[end - length : end]), int(answer)) for end, length, answer in spans
    )
    num_options, answers, characters = (
        tuple(arrays[name].tolist()) for name in ("num-options", "answers", "characters")
    )
    return ScoredItems(requests, num_options, answers, characters)
