"""Token ids of items, split into context and answer as in lm-evaluation-harness.

Many tokenizers add an end token to every text (``add_eos_token`` of LLaMA's, ``</s>`` of
RoBERTa's). After a prompt it would say that nothing follows. The number of tokens of a prompt would
also not be the position at which its answer begins.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from espalier.amounts import count
from espalier.data.token_pieces import Encode
from espalier.errors import InputError


@dataclass(frozen=True)
class Encoded:
    """Token ids of a context and its continuation, which has ``answer_tokens`` tokens."""

    token_ids: tuple[int, ...]
    answer_tokens: int

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """Start and end of the tokens with a loss."""
        return ((len(self.token_ids) - self.answer_tokens, len(self.token_ids)),)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Number of tokens of each packed record; empty: it is one record."""
        return ()

    @property
    def items(self) -> tuple[int, ...]:
        """Empty: the sequence is made from the item with its number."""
        return ()


@dataclass(frozen=True)
class Marked:
    """Token ids of a training sequence in which any tokens may have a loss."""

    token_ids: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]
    """Start and end of each stretch of tokens with a loss, in order."""
    lengths: tuple[int, ...] = ()
    """Number of tokens of each packed record; empty: it is one record."""
    items: tuple[int, ...] = ()
    """Numbers of the client's items from which it is made; empty: of the item with its number."""

    def shortened(self, max_tokens: int) -> "Marked":
        """Return the first ``max_tokens`` tokens."""
        spans = ((start, min(end, max_tokens)) for start, end in self.spans)
        kept = tuple((start, end) for start, end in spans if start < end)
        return replace(self, token_ids=self.token_ids[:max_tokens], spans=kept)

    @property
    def has_loss(self) -> bool:
        """True if a token after the first one has a loss; the first is never predicted."""
        return any(end > max(start, 1) for start, end in self.spans)


def encode_pair(encode: Encode, context: str, continuation: str) -> Encoded:
    """Encode a context with its continuation, and split the tokens at the end of the context.

    This is ``_encode_pair`` of lm-evaluation-harness 0.4.13. Blank space at the end of the context
    belongs to the continuation, because tokenizers join it to the next word. The last token always
    belongs to the continuation, even if the two are joined into fewer tokens than the context has
    without it. Raises InputError if both together have fewer than two tokens, so no token has a
    context.

    Parameters
    ----------
    encode : tokenizer; it can add tokens before a text but not after it
        (``special_tokens.prompt_encoder``), because otherwise the context's length is not the start
        of the continuation
    """
    stem = context.rstrip()
    token_ids = tuple(encode(context + continuation))
    if len(token_ids) < 2:
        raise InputError(
            f"an item with its answer has {count(len(token_ids), 'token')}, but a prediction"
            " needs at least 2; use a tokenizer with a beginning-of-text token, or remove items"
            " that are this short"
        )
    # At least one token on either side.
    start = min(max(1, len(encode(stem))), len(token_ids) - 1)
    return Encoded(token_ids, len(token_ids) - start)


def keep_right(
    encoded: Encoded, max_tokens: int, where: str = "", key: str = "task.max-tokens"
) -> Encoded:
    """Return the last ``max_tokens`` tokens, which include the whole answer.

    Raises InputError if the answer leaves no room for a token of the context.

    Parameters
    ----------
    where : position of the item, for errors
    key : setting to raise, for errors
    """
    if encoded.answer_tokens >= max_tokens:
        raise InputError(
            f"{where or 'an item'}: an answer has {encoded.answer_tokens} tokens, but only"
            f" {max_tokens - 1} fit after the last token of its prompt; raise {key}, or remove"
            " items with long answers"
        )
    return Encoded(encoded.token_ids[-max_tokens:], encoded.answer_tokens)


_PROBES = ("a", "b", "0", ".", "the")
"""Texts that most tokenizers encode without special tokens."""
_MAX_PROBES = 64
"""Number of tokens of the vocabulary that are tried after ``_PROBES``."""


def prompt_encoder(tokenizer: Any, encode: Encode | None = None) -> Encode:
    """Return a function that encodes a text without the tokens that are added at its end.

    Tokens that the tokenizer adds before a text are kept. Raises InputError if the added tokens
    cannot be determined.

    Parameters
    ----------
    tokenizer : tokenizer of Hugging Face
    encode : ``encode`` of the same tokenizer with a cache; None: the tokenizer's own
    """
    encode_text = encode or tokenizer.encode
    ending = list(added_behind(tokenizer))
    if not ending:
        return encode_text

    def encode_prompt(text: str) -> Sequence[int]:
        tokens = list(encode_text(text))
        return tokens[: -len(ending)] if tokens[-len(ending) :] == ending else tokens

    return encode_prompt


def added_behind(tokenizer: Any) -> tuple[int, ...]:
    """Return the token ids that a tokenizer adds at the end of every text; empty if there are none.

    Raises InputError if the tokenizer encodes every text differently with special tokens than
    without them.
    """
    for text in _probes(tokenizer):
        plain, with_special = (
            list(tokenizer.encode(text, add_special_tokens=added)) for added in (False, True)
        )
        if plain and with_special == plain:
            return ()
        room = len(with_special) - len(plain)
        places = [
            place for place in range(room + 1) if with_special[place : place + len(plain)] == plain
        ]
        if plain and len(places) == 1:
            return tuple(with_special[places[0] + len(plain) :])
    raise InputError(
        "tokenizer: the tokens that it adds to the end of a text cannot be determined, because"
        " its special tokens change or hide the others; use a model whose tokenizer adds tokens"
        " only before or after the text"
    )


def _probes(tokenizer: Any) -> Iterator[str]:
    yield from _PROBES
    special = set(tokenizer.all_special_ids)
    ordinary = [
        number
        for number in range(min(len(tokenizer), _MAX_PROBES + len(special)))
        if number not in special
    ]
    yield from (tokenizer.decode([number]) for number in ordinary)
