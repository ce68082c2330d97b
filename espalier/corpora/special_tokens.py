"""Tokens that a tokenizer adds behind every text, and texts that are to be continued, which must not end in them.

Many tokenizers put a token for the end behind a text (``add_eos_token`` of LLaMA's, ``</s>`` of RoBERTa's). Behind a prompt it
would say that nothing follows, and the number of tokens of a prompt would not be the place where its answer begins.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from espalier.corpora.token_pieces import Encode
from espalier.settings.mistakes import Mistake

_PROBES = ("a", "b", "0", ".", "the")
"""Texts of which most tokenizers make tokens that are not special."""
_MOST_PROBES = 64
"""Tokens of the vocabulary that are tried behind them."""


def prompt_encoder(tokenizer: Any, encode: Encode | None = None) -> Encode:
    """Return a function from a text that is to be continued to its token ids.

    They are those of the tokenizer, with what it puts before a text and without what it puts behind it.

    Parameters
    ----------
    tokenizer : one of Hugging Face's
    encode : the same tokenizer's ``encode``, if it remembers texts; None: the tokenizer's own

    Raises
    ------
    Mistake
        What the tokenizer adds cannot be told.
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
    """Return the token ids that a tokenizer adds behind every text; empty if it adds none.

    Raises
    ------
    Mistake
        It encodes every text otherwise with special tokens than without.
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
    raise Mistake(
        "tokenizer: which tokens it adds behind a text cannot be told, because its special tokens"
        " change or hide the others; take a model whose tokenizer adds them before or behind the"
        " text"
    )


def _probes(tokenizer: Any) -> Iterator[str]:
    yield from _PROBES
    special = set(tokenizer.all_special_ids)
    ordinary = [
        number
        for number in range(min(len(tokenizer), _MOST_PROBES + len(special)))
        if number not in special
    ]
    yield from (tokenizer.decode([number]) for number in ordinary)
