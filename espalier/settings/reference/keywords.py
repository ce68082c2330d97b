"""Settings as keyword arguments of ``espalier.simulate`` and ``espalier.submit``.

A keyword is a settings key with ``_`` in place of each hyphen and dot: ``lora_rank`` is
``lora.rank``. ``espalier/settings/reference/run_keywords.py`` has the types of all keywords; the command

    python -m espalier.settings.reference.page

writes it.
"""

import difflib
import os
from collections.abc import Mapping
from typing import Any

from espalier.errors import InputError
from espalier.settings.reference.schema import Key, keys_of_a_run
from espalier.settings.run import default_values

FILE = "espalier/settings/reference/run_keywords.py"
WIDTH = 100
"""Maximum number of characters per line."""
HEAD = '''"""Types of the settings as keyword arguments; written from the schema, do not edit.

``espalier.settings.reference.keywords`` explains the names, docs/settings.md the keys.
"""

from os import PathLike
from typing import Literal, TypedDict

Text = str | PathLike[str]
"""Text, in many cases a path."""


class RunKeywords(TypedDict, total=False):
    """Settings of a run by keyword."""

'''


def keyword_of(key: str) -> str:
    """Return the keyword of a settings key: ``lora.rank`` becomes ``lora_rank``."""
    return key.replace("-", "_").replace(".", "_")


def settings_from(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by dotted key from keyword arguments; paths become text.

    Raises
    ------
    InputError
        A keyword is not the one of a setting.
    """
    keys = {keyword_of(key): key for key in default_values()}
    lines = []
    for keyword in keywords:
        if keyword not in keys:
            close = difflib.get_close_matches(keyword_of(keyword), keys, n=1, cutoff=0.7)
            meant = f"did you mean {close[0]}? " if close else ""
            lines.append(
                f"{keyword}: there is no such setting; {meant}a keyword is a settings key with _"
                " in place of each hyphen and dot, such as lora_rank"
            )
    if lines:
        raise InputError("\n".join(lines))
    return {keys[keyword]: _plain(value) for keyword, value in keywords.items()}


def _plain(value: Any) -> Any:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


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
