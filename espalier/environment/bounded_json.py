"""Parser for untrusted JSON that bounds size and nesting depth before it parses.

Parsers recurse once per bracket, on Python's stack or on C's; an overflow of the C stack ends the
process. Documents of models, settings, records and messages are nested only a few levels deep.
"""

import json
import re
from typing import Any

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


def read_json(text: str | bytes) -> Any:
    """Parse a JSON text.

    Raises ValueError if it is not JSON; UnboundedJsonError, a ValueError too, if it is longer than
    ``MAX_CHARACTERS`` or nested deeper than ``MAX_DEPTH``.
    """
    if len(text) > MAX_CHARACTERS:
        raise UnboundedJsonError(
            f"it has {len(text)} characters; at most {MAX_CHARACTERS} are allowed"
        )
    if isinstance(text, bytes):
        text = text.decode(json.detect_encoding(text), "surrogatepass")
    require_flat(text)
    return json.loads(text)


def require_flat(text: str) -> None:
    """Raise UnboundedJsonError if brackets outside strings are nested deeper than ``MAX_DEPTH``.

    The text is scanned and not parsed.
    """
    # A text with so few opening brackets cannot be nested deeper; most texts end here.
    if text.count("[") + text.count("{") <= MAX_DEPTH:
        return
    depth = 0
    for found in _STRINGS_AND_BRACKETS.finditer(text):
        first = text[found.start()]
        if first in "[{":
            depth += 1
            if depth > MAX_DEPTH:
                raise UnboundedJsonError(
                    f"its lists and objects are nested more than {MAX_DEPTH} levels deep"
                )
        elif first in "]}":
            depth -= 1
