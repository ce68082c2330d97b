"""Grid of settings: each word after ``espalier sweep`` may have several values."""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from espalier.errors import InputError

PRESET = "preset"
SET_BY_THE_SWEEP = ("out-dir", "resume-from")
MAX_CELLS = 1000
MAX_CHARACTERS = 100
"""Maximum length of the name of a cell, which is the name of a directory."""
SEPARATOR = "_"
QUOTES = "\"'"


@dataclass(frozen=True)
class Cell:
    """One combination of values."""

    words: tuple[str, ...]
    """All words of the run, as for ``espalier run``."""
    name: str
    """Values that tell the cell from others, as the name of its directory."""


def split_values(text: str) -> list[str]:
    """Split a list of values at its commas, except those inside of quotes.

    A value may stand in quotes, which it keeps: ``"attn.q,attn.v",all`` has two values. Raises
    InputError if a quote is not closed, or a value is empty or occurs twice.
    """
    values = [""]
    quote = ""
    for character in text:
        if character == "," and not quote:
            values.append("")
            continue
        if character == quote:
            quote = ""
        elif character in QUOTES and not quote and not values[-1].strip():
            quote = character
        values[-1] += character
    values = [value.strip() for value in values]
    if quote:
        raise InputError(f"{text}: the quote {quote} is not closed; close it, or leave it out")
    if len(values) > 1 and "" in values:
        raise InputError(f"{text}: a value is empty; write values as a,b or 'a,b' in quotes")
    if len(set(values)) < len(values):
        raise InputError(f"{text}: a value occurs twice; name each value once")
    return values


def cells_of(words: Sequence[str]) -> list[Cell]:
    """Return all combinations of the values of the words, the last word varying fastest.

    Raises InputError if no word has several values, a key occurs twice or is set by the sweep, or
    there are too many cells.

    Parameters
    ----------
    words : at most one word with presets, and ``key=values``
    """
    axes = [_axis(word) for word in words]
    keys = [key for key, _ in axes]
    for key in keys:
        if key == PRESET and keys.count(key) > 1:
            raise InputError(
                f"more than one preset: {' '.join(word for word in words if '=' not in word)};"
                " write presets in one word, a,b, and settings as key=value without spaces"
            )
        if keys.count(key) > 1:
            raise InputError(f"{key}: is given twice; write all its values in one word, {key}=a,b")
        if key in SET_BY_THE_SWEEP:
            raise InputError(f"{key}: is set by the sweep; leave it out, and name --out")
    number = prod(len(values) for _, values in axes)
    if number == 1:
        raise InputError(
            "no word has several values; write key=a,b, or use espalier run for one run"
        )
    if number > MAX_CELLS:
        raise InputError(f"the grid has {number} cells, at most {MAX_CELLS} are run; name fewer")
    varied = [key for key, values in axes if len(values) > 1]
    cells = []
    for values in product(*(values for _, values in axes)):
        chosen = dict(zip(keys, values, strict=True))
        parts = [_word(key, chosen[key]) for key in varied]
        cells.append(Cell(tuple(_word(*pair) for pair in chosen.items()), _name(parts)))
    return cells


def _axis(word: str) -> tuple[str, list[str]]:
    """Return the key of a word, or ``preset``, and its values."""
    key, equals, values = word.partition("=")
    if not equals:
        return PRESET, split_values(word)
    return key.strip(), split_values(values)


def _word(key: str, value: str) -> str:
    return value if key == PRESET else f"{key}={value}"


def _name(parts: Sequence[str]) -> str:
    """Return the name of a cell; a hash tells names apart that were changed or shortened."""
    whole = SEPARATOR.join(parts)
    name = re.sub(r"[^\w.=+-]+", "-", whole)[:MAX_CHARACTERS]
    if name == whole and name.strip("."):
        return name
    return f"{name}-{hashlib.sha256(whole.encode()).hexdigest()[:8]}"
