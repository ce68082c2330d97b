"""Generator of the block of pyproject.toml that holds a run's default settings.

Flower accepts only keys that pyproject.toml declares, so the block lists all keys.
"""

import json
import textwrap
from collections.abc import Iterator
from typing import Any

from espalier.settings.reference.schema import Key, as_text, keys_of, readers_of, tables_of_a_run

BEGIN = (
    "# >>> settings of a run, written by `python -m espalier.settings.reference.page` from the schema in"
    " espalier/settings; do not edit"
)
END = "# <<< settings of a run"
"""Last marker line; the block is between the two marker lines in pyproject.toml."""

WIDTH = 128
"""Maximum number of characters per line."""


def app_config() -> str:
    """Return ``[tool.flwr.app.config]`` and its tables as TOML.

    Each key has its default value, below a comment with its description.
    """
    lines = [
        "# Presets in conf/ and `--run-config` override these defaults. docs/settings.md has them"
        " as tables."
    ]
    for name, table in tables_of_a_run().items():
        lines += ["", *_head(name)]
        for key in keys_of(table, name):
            lines += _comment(key)
            lines.append(f"{key.name} = {_toml(key.default)}")
    return "\n".join(lines) + "\n"


def with_app_config(pyproject: str) -> str:
    """Return the text of a pyproject.toml with the current block between the two marker lines.

    Raises
    ------
    ValueError
        A marker line is missing or occurs twice.
    """
    if pyproject.count(f"{BEGIN}\n") != 1 or pyproject.count(f"{END}\n") != 1:
        raise ValueError(f"pyproject.toml: needs one line {BEGIN!r} and one line {END!r}")
    before, _, rest = pyproject.partition(f"{BEGIN}\n")
    after = rest.partition(f"{END}\n")[2]
    return f"{before}{BEGIN}\n{app_config()}{END}\n{after}"


def _head(name: str) -> Iterator[str]:
    if not name:
        yield "[tool.flwr.app.config]"
        return
    yield f"[tool.flwr.app.config.{name}]  # {read_by(name)}"


def read_by(table: str) -> str:
    """Return which methods read a table, in words."""
    readers = readers_of(table)
    everybody = readers_of("")
    return "read by every method" if readers == everybody else f"read by {', '.join(readers)}"


def _comment(key: Key) -> list[str]:
    choices = (
        f" [{' | '.join(map(as_text, key.choices))}]"
        if key.choices and not isinstance(key.default, bool)
        else ""
    )
    return textwrap.wrap(
        key.description + choices,
        WIDTH,
        initial_indent="# ",
        subsequent_indent="# ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _toml(value: Any) -> str:
    """Return a setting's value as TOML; strings are escaped as in JSON."""
    return json.dumps(value) if isinstance(value, str) else as_text(value)
