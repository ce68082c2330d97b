"""Special tokens at the end of a text, which a prompt must not have.

Many tokenizers add an end token to every text (``add_eos_token`` of LLaMA's, ``</s>`` of
RoBERTa's). After a prompt it would say that nothing follows. The number of tokens of a prompt would
also not be the position at which its answer begins.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from espalier.data.token_pieces import Encode
from espalier.errors import InputError

_PROBES = ("a", "b", "0", ".", "the")
"""Texts that most tokenizers encode without special tokens."""
_MAX_PROBES = 64
"""Number of tokens of the vocabulary that are tried after ``_PROBES``."""


def prompt_encoder(tokenizer: Any, encode: Encode | None = None) -> Encode:
    """Return a function that encodes a text without the tokens that are added at its end.

    Tokens that the tokenizer adds before a text are kept.

    Parameters
    ----------
    tokenizer : tokenizer of Hugging Face
    encode : ``encode`` of the same tokenizer with a cache; None: the tokenizer's own

    Raises
    ------
    InputError
        The added tokens cannot be determined.
    """
    whole = encode or tokenizer.encode
    behind = list(added_behind(tokenizer))
    if not behind:
        return whole

    def encode_prompt(text: str) -> Sequence[int]:
        tokens = list(whole(text))
        return tokens[: -len(behind)] if tokens[-len(behind) :] == behind else tokens

    return encode_prompt


def added_behind(tokenizer: Any) -> tuple[int, ...]:
    """Return the token ids that a tokenizer adds at the end of every text; empty if there are none.

    Raises
    ------
    InputError
        The tokenizer encodes every text differently with special tokens than without them.
    """
    for text in _probes(tokenizer):
        plain, whole = (
            list(tokenizer.encode(text, add_special_tokens=added)) for added in (False, True)
        )
        if plain and whole == plain:
            return ()
        room = len(whole) - len(plain)
        places = [place for place in range(room + 1) if whole[place : place + len(plain)] == plain]
        if plain and len(places) == 1:
            return tuple(whole[places[0] + len(plain) :])
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
