"""Comparison of runs as a command and as files (``espalier compare``)."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from espalier.environment.paths import at_home
from espalier.errors import InputError, as_command
from espalier.results.comparison.compared_runs import Comparison, compare
from espalier.results.comparison.page import html_page
from espalier.results.comparison.pareto import Plot, draw
from espalier.results.comparison.table import (
    TableOf,
    csv_text,
    notes,
    plot_of,
    results_table,
    settings_table,
)
from espalier.results.run_list import console_for_tables, runs_of
from espalier.storage.atomic import write_bytes

FORMS = (".html", ".md", ".csv", ".png", ".svg")
LONGEST = 60
"""Maximum number of characters of a setting in the terminal."""


def require_places(files: Sequence[str]) -> list[Path]:
    """Return the files to write.

    Raises InputError if an ending is unknown, or a directory does not exist.
    """
    paths = []
    for name in files:
        path = at_home(name).absolute()
        if path.suffix not in FORMS:
            raise InputError(f"--out {name}: its name must end in {', '.join(FORMS)}")
        if path.is_dir() or not path.parent.is_dir():
            raise InputError(f"--out {name}: {path.parent} is not a directory, or {path} is one")
        paths.append(path)
    return paths


def file_content(path: Path, comparison: Comparison, plot: Plot | None) -> bytes:
    """Return the content of a file of the comparison, in the format of its ending.

    Raises InputError if a plot is asked for, and fewer than two runs have both of its values.
    """
    if path.suffix == ".csv":
        return csv_text(comparison).encode()
    if path.suffix == ".md":
        return markdown(comparison, plot).encode()
    if path.suffix == ".html":
        return html_page(comparison, plot).encode()
    if plot is None:
        raise InputError(
            f"--out {path.name}: fewer than two runs have both values of the plot; choose others"
            " with --metric and --against, or another ending"
        )
    return draw(plot, path.suffix.removeprefix("."))


def markdown(comparison: Comparison, plot: Plot | None) -> str:
    """Return the comparison in Markdown; the best value of a column is bold."""
    parts = ["# Comparison of runs", _markdown_table(results_table(comparison, plot))]
    if (settings := settings_table(comparison)).rows:
        parts += ["## Settings that differ", _markdown_table(settings)]
    if lines := notes(comparison):
        parts.append("\n".join(f"- {_escaped(line)}" for line in lines))
    return "\n\n".join(parts) + "\n"


def _markdown_table(table: TableOf) -> str:
    lines = [f"| {' | '.join(map(_escaped, table.titles))} |", "|---" * len(table.titles) + "|"]
    for row in table.rows:
        cells = [f"**{_escaped(cell.text)}**" if cell.best else _escaped(cell.text) for cell in row]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _escaped(text: str) -> str:
    # The backslash first, so that the backslashes added for ``|`` are not doubled.
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")


def show(comparison: Comparison, plot: Plot | None) -> None:
    """Print the tables and notes of a comparison."""
    console_for_tables().print(_terminal_table(results_table(comparison, plot)))
    settings = settings_table(comparison)
    if settings.rows:
        print("settings that differ:")
        # A line per setting fits into a terminal, whatever the number of settings.
        for key, *values in settings.rows:
            shown = [f"#{n} {_cut(cell.text)}" for n, cell in enumerate(values, start=1)]
            print(f"  {key.text}: {', '.join(shown)}")
    if plot is not None:
        print(f"Pareto: {plot.quality_title} against {plot.cost_title}")
    for line in notes(comparison):
        print(line)


def _terminal_table(table: TableOf) -> Table:
    shown = Table()
    for index, title in enumerate(table.titles):
        shown.add_column(title, justify="left" if index in (1, 2) else "right", overflow="fold")
    for row in table.rows:
        shown.add_row(*(Text(cell.text, style="bold" if cell.best else "") for cell in row))
    return shown


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else f"…{text[1 - LONGEST :]}"


@as_command
def main(document: Mapping[str, Any]) -> None:
    """Print a comparison of runs, and write it to files.

    Parameters
    ----------
    document : ``runs``, directories of runs or with runs; ``out``, files to write; ``metric`` and
        ``against`` of the plot, or empty; optionally ``labels``, a name for each run
    """
    paths = require_places(document["out"])
    comparison = compare(runs_of(document["runs"]), document.get("labels", ()))
    plot = plot_of(comparison, document["metric"], document["against"])
    # All contents are made before the first file is written, so an error leaves none.
    contents = {path: file_content(path, comparison, plot) for path in paths}
    show(comparison, plot)
    for path, content in contents.items():
        write_bytes(path, content)
        print(f"written: {path}")
