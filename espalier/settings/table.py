"""What all settings tables share: hyphenated keys, no unknown keys, no silent conversion."""

import difflib
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, ValidationError

ReadWith = Mapping[str, Mapping[str, tuple[Any, ...]]]
"""Key -> other key -> the values with which the first is read."""


def _hyphenated(name: str) -> str:
    return name.replace("_", "-")


class Table(BaseModel):
    """A table of settings; its keys are written with hyphens, as in ``pyproject.toml``."""

    model_config = ConfigDict(
        alias_generator=_hyphenated,
        populate_by_name=True,
        extra="forbid",
        strict=True,
        frozen=True,
        allow_inf_nan=False,
    )

    READ_WITH: ClassVar[ReadWith] = {}
    """Keys that are read only where others of the table, each of them named, have one of some values."""


def mistake_lines(error: ValidationError, known: Sequence[str], name: str = "") -> list[str]:
    """One line per mistake: the key, what was given, what is allowed.

    Parameters
    ----------
    known : dotted keys that there are
    name : the table that was validated; empty for one whose keys have no table
    """
    return [_line(detail, known, f"{name}." if name else "") for detail in error.errors()]


def _line(detail: Any, known: Sequence[str], prefix: str) -> str:
    key = (prefix + ".".join(str(part) for part in detail["loc"])).rstrip(".")
    if detail["type"] == "extra_forbidden":
        return unknown_key(
            key,
            [name for name in known if name.startswith(prefix)]
            + [name for name in known if "." in name],
        )
    if detail["type"] == "missing":
        return f"{key}: has to be given"
    if detail["type"] in ("bool_type", "bool_parsing"):
        return f"{key} = {detail['input']!r}: write true or false"
    message = detail["msg"].removeprefix("Value error, ")
    return f"{key} = {detail['input']!r}: {message[0].lower()}{message[1:]}"


def unknown_key(key: str, known: Sequence[str]) -> str:
    """What is said of a key that is none: a key of this name in another table, one of a like name, or all that there are."""
    namesakes = [
        name for name in known if name.rpartition(".")[2] == key.rpartition(".")[2] != name
    ]
    if close := namesakes[:1] or difflib.get_close_matches(key, known, n=1):
        return f"{key}: unknown key; did you mean '{close[0]}'?"
    return f"{key}: unknown key; known are {', '.join(dict.fromkeys(known))}"
