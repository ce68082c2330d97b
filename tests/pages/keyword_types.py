"""Generator of the types of the settings as keyword arguments."""

from espalier.settings.reference.keywords import keyword_of
from tests.pages.schema import Key, keys_of_a_run

FILE = "espalier/settings/reference/run_keywords.py"
WIDTH = 100
"""Maximum number of characters per line."""
HEAD = '''"""Types of the settings as keyword arguments; written from the schema, do not edit.

``espalier.settings.reference.keywords`` explains the names, docs/reference/settings.md the keys.
"""

from os import PathLike
from typing import Literal, TypedDict

Text = str | PathLike[str]
"""Text, in many cases a path."""


class RunKeywords(TypedDict, total=False):
    """Settings of a run by keyword."""

'''


def keywords_module() -> str:
    """Return the text of the module with the types of all keywords."""
    return HEAD + "".join(map(_field, keys_of_a_run()))


def _field(key: Key) -> str:
    line = f"    {keyword_of(key.dotted)}: {_type(key)}\n"
    if len(line) <= WIDTH + 1:
        return line
    values = "".join(f'        "{choice}",\n' for choice in key.choices)
    return f"    {keyword_of(key.dotted)}: Literal[\n{values}    ]\n"


def _type(key: Key) -> str:
    if not isinstance(key.default, str):
        return type(key.default).__name__
    # A partition may also be "flwr:" with a name.
    if not key.choices or key.dotted == "data.partition":
        return "Text"
    return "Literal[" + ", ".join(f'"{choice}"' for choice in key.choices) + "]"
