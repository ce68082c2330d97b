"""Generator of docs/reference/settings.md, default settings in pyproject.toml, and keyword types.

    python -m tests.pages.settings_page

The first two list every setting with its default, allowed values and meaning. They are written to
the checkout that contains this package. Flower accepts only keys that pyproject.toml declares.
"""

import json
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

from espalier.settings.keys import as_text, concerns
from espalier.settings.node import NodeSettings
from espalier.settings.registry import METHODS
from tests.pages.keyword_types import FILE, keywords_module
from tests.pages.method_pages import page_of
from tests.pages.schema import Key, keys_of, tables_of_a_run

PAGE = "docs/reference/settings.md"
INTRODUCTION = """# Settings

After reading this page you can look up every settings key, with its default and its allowed values.

Written by `python -m tests.pages.settings_page` from `espalier/settings`, \
the source of all settings.

A run uses the defaults, then a preset of `conf/`, then `key=value` pairs:

```
espalier run fedspallm pruning.sparsity=0.6 num-clients=4
```

`espalier run` takes at most one preset, by name or path, and any number of pairs.
`flwr run . --run-config` takes a file or pairs.
All errors are reported together, before a model is loaded: wrong keys, types and values, and keys
given by hand that the run does not read.
Relative paths start at the current directory of the command; with plain `flwr run` that is the
directory in which Flower's local SuperLink was first started.
"""
NODE = """## node-config

Settings of a site, including the site policy:
`flower-supernode --node-config 'site="hospital-a" data-path="/data/notes.txt"'`.
All keys but `site` are optional. \
[Deployment](../how-to/deployment.md#4-a-site) explains the setup of a site,
and [privacy](../privacy/reference.md#site-policy) the decisions of its owner.
"""


BEGIN = (
    "# >>> settings of a run, written by `python -m tests.pages.settings_page`; edit"
    " espalier/settings"
)
END = "# <<< settings of a run"
"""Last marker line; the block is between the two marker lines in pyproject.toml."""

WIDTH = 100
"""Maximum number of characters per line."""


def settings_page() -> str:
    """Return the page as Markdown: a section per table, a row per key."""
    sections = [INTRODUCTION]
    for name, table in tables_of_a_run().items():
        sections.append("\n".join([*_head(name), *_rows(keys_of(table, name)), ""]))
    sections.append("\n".join([NODE, *_rows(keys_of(NodeSettings)), ""]))
    return "\n".join(sections)


def _head(name: str) -> Iterator[str]:
    if not name:
        yield from ("## run", "", "Top-level keys, read by every method.", "")
        return
    about = (
        f" See also [the page of the method](../methods/{page_of(name)})."
        if name in METHODS
        else ""
    )
    yield from (f"## {name}", "", f"Table `[{name}]`, {_read_by(name)}.{about}", "")


def _rows(keys: Sequence[Key]) -> Iterator[str]:
    if not keys:
        yield "It has no keys of its own; the shared tables say which keys the method reads."
        return
    yield from ("| key | default | allowed | meaning |", "|---|---|---|---|")
    for key in keys:
        allowed = key.allowed or "text"
        default = "" if key.default == "" else f"`{as_text(key.default)}`"
        yield (
            f"| `{key.dotted}` | {default} | {allowed} |"
            f" {key.description.replace('|', chr(92) + '|')} |"
        )


def app_config() -> str:
    """Return ``[tool.flwr.app.config]`` and its tables as TOML.

    Each key has its default value, below a comment with its description.
    """
    lines = [
        "# Presets in conf/ and `--run-config` override these defaults.",
        "# docs/reference/settings.md has them as tables.",
    ]
    for name, table in tables_of_a_run().items():
        if not keys_of(table, name):
            continue
        heading = f"[tool.flwr.app.config.{name}]" if name else "[tool.flwr.app.config]"
        lines += ["", *(_wrapped(_read_by(name).capitalize() + ".") if name else ()), heading]
        for key in keys_of(table, name):
            value = key.default
            text = json.dumps(value) if isinstance(value, str) else as_text(value)
            lines += [*_comment(key), f"{key.name} = {text}"]
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


def _read_by(table: str) -> str:
    """Return which methods read a table, in words."""
    readers = [method for method in METHODS if concerns(table, method)]
    everybody = len(readers) == len(METHODS)
    return "read by every method" if everybody else f"read by {', '.join(readers)}"


def _comment(key: Key) -> list[str]:
    choices = (
        f" [{' | '.join(map(as_text, key.choices))}]"
        if key.choices and not isinstance(key.default, bool)
        else ""
    )
    return _wrapped(key.description + choices)


def _wrapped(text: str) -> list[str]:
    """Return the lines of a TOML comment."""
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent="# ",
        subsequent_indent="# ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def main() -> None:
    """Write docs/reference/settings.md, the defaults in pyproject.toml, and the keyword types."""
    root = Path(__file__).parents[2]
    (root / FILE).write_text(keywords_module())
    (root / PAGE).write_text(settings_page())
    pyproject = root / "pyproject.toml"
    pyproject.write_text(with_app_config(pyproject.read_text()))


if __name__ == "__main__":
    main()
