"""The block of pyproject.toml that holds the defaults of a run, written from the schema, so that Flower knows every key."""

import json
import textwrap
from collections.abc import Iterator
from typing import Any

from espalier.settings.schema import Key, as_text, keys_of, readers_of, tables_of_a_run

BEGIN = (
    "# >>> settings of a run, written by `python -m espalier.settings.page` from the schema in"
    " espalier/settings; do not edit"
)
END = "# <<< settings of a run"
"""The lines of pyproject.toml between which the block stands."""

WIDTH = 128
"""Characters of a line at most."""


def app_config() -> str:
    """``[tool.flwr.app.config]`` as TOML, its tables with it: each key with its default below its description."""
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
    """The text of a pyproject.toml, with the block of today between the two marker lines.

    Raises
    ------
    ValueError
        A marker line is missing, or there twice.
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
    """Which methods read a table, in words."""
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
    """A value of a setting as TOML, whose strings are written as in JSON."""
    return json.dumps(value) if isinstance(value, str) else as_text(value)
