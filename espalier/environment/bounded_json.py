"""Parser for untrusted JSON that bounds size and nesting depth before it parses.

Parsers recurse once per bracket, on Python's stack or on C's; an overflow of the C stack ends the
process. Documents of models, settings, records and messages are nested only a few levels deep.
"""

import json
import re
from pathlib import Path
from typing import Any

from espalier.errors import InputError

MAX_DEPTH = 64
"""Maximum nesting depth of lists and objects."""
MAX_CHARACTERS = 1 << 28
"""Maximum length of a document; the largest tokenizers, with 250,000 words, have 40 MB."""

_STRINGS_AND_BRACKETS = re.compile(r'"(?:[^"\\]++|\\.)*+"?+|[\[{]|[\]}]', re.DOTALL)
"""Pattern of strings and brackets.

Its quantifiers are possessive, so that matching takes linear time. A string without a closing quote
extends to the end of the text.
"""


class UnboundedJsonError(ValueError):
    """Error for a text that is larger or nested deeper than allowed."""


class RepeatedKeyError(ValueError):
    """Error for an object that has the same key twice."""


def read_json(text: str | bytes, *, unique_keys: bool = False) -> Any:
    """Parse a JSON text.

    Raises ValueError if it is not JSON; UnboundedJsonError, a ValueError too, if it is longer than
    ``MAX_CHARACTERS`` or nested deeper than ``MAX_DEPTH``; with ``unique_keys`` RepeatedKeyError,
    also one, if an object has a key twice, of which the last one would count.
    """
    if len(text) > MAX_CHARACTERS:
        raise UnboundedJsonError(
            f"it has {len(text)} characters; at most {MAX_CHARACTERS} are allowed"
        )
    if isinstance(text, bytes):
        text = text.decode(json.detect_encoding(text), "surrogatepass")
    require_flat(text)
    return json.loads(text, object_pairs_hook=_unique if unique_keys else None)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise RepeatedKeyError("an object has the same key twice")
    return found


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds keys and values.

    Raises InputError if the file cannot be read, or is not a JSON object.
    """
    try:
        document = read_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}; copy it again") from None
    except ValueError as error:
        raise InputError(f"{path}: is not a JSON file: {error}; copy it again") from None
    if not isinstance(document, dict):
        raise InputError(
            f"{path}: contains a JSON {type(document).__name__} instead of keys and values; copy"
            " it again"
        )
    return document


def require_flat(text: str) -> None:
    """Raise UnboundedJsonError if brackets outside strings are nested deeper than ``MAX_DEPTH``.

    The text is scanned and not parsed.
    """
    # A text with so few opening brackets cannot be nested deeper; most texts end here.
    if text.count("[") + text.count("{") <= MAX_DEPTH:
        return
    depth = 0
    for match in _STRINGS_AND_BRACKETS.finditer(text):
        first = text[match.start()]
        if first in "[{":
            depth += 1
            if depth > MAX_DEPTH:
                raise UnboundedJsonError(
                    f"its lists and objects are nested more than {MAX_DEPTH} levels deep"
                )
        elif first in "]}":
            depth -= 1
