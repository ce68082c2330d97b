"""JSON from outside: its size and how deep it is nested are bounded before it is parsed.

Parsers go down a level for each bracket, on Python's stack or on C's, which ends the process. Documents of models, settings,
records and messages have a handful of levels.
"""

import json
import re
from collections.abc import Callable
from typing import Any

MOST_DEPTH = 64
"""Levels of lists and objects within each other."""
MOST_CHARACTERS = 1 << 28
"""Maximum length of a document; tokenizers with 250,000 words, the largest, have 40 MB."""

_STRINGS_AND_BRACKETS = re.compile(r'"(?:[^"\\]++|\\.)*+"?+|[\[{]|[\]}]', re.DOTALL)
"""Possessive, so that no text takes more time than its length; a string without an end reaches to the end of the text."""


class UnboundedJsonError(ValueError):
    """The text is larger, or nested deeper, than any document that is read here."""


def read_json(
    text: str | bytes,
    most_characters: int = MOST_CHARACTERS,
    parse_constant: Callable[[str], Any] | None = None,
) -> Any:
    """Parse a JSON text.

    Raises
    ------
    ValueError
        It is no JSON; or it is longer than ``most_characters``, or nested deeper than ``MOST_DEPTH`` (``UnboundedJsonError``).
    """
    if isinstance(text, bytes):
        require_short(len(text), most_characters)
        text = text.decode(json.detect_encoding(text), "surrogatepass")
    require_short(len(text), most_characters)
    require_flat(text)
    return json.loads(text, parse_constant=parse_constant)


def require_short(characters: int, most: int) -> None:
    """Raise UnboundedJsonError if a document has more than ``most`` characters."""
    if characters > most:
        raise UnboundedJsonError(f"it has {characters} characters, at most {most} are read")


def require_flat(text: str) -> None:
    """Raise UnboundedJsonError if brackets outside strings are nested deeper than ``MOST_DEPTH``; nothing is parsed."""
    if text.count("[") + text.count("{") <= MOST_DEPTH:
        return
    depth = 0
    for found in _STRINGS_AND_BRACKETS.finditer(text):
        first = text[found.start()]
        if first in "[{":
            depth += 1
            if depth > MOST_DEPTH:
                raise UnboundedJsonError(
                    f"its lists and objects are nested more than {MOST_DEPTH} deep"
                )
        elif first in "]}":
            depth -= 1
