"""List of runs with their status and main figures (``espalier runs``)."""

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from espalier.amounts import duration
from espalier.environment.paths import at_home
from espalier.errors import EspalierError, InputError, tell
from espalier.identity.names import STAMP, printable
from espalier.results.figures import (
    DENSE,
    FEDERATED,
    Size,
    figure_text,
    main_quality,
    size_of,
)
from espalier.results.finished_run import ADAPTER, FinishedRun, open_run
from espalier.results.run_status import (
    COMPLETED,
    INTERRUPTED,
    LONGEST_REASON,
    RUNNING,
    SUMMARY,
    is_run,
    run_status,
)

DEPTH = 3
"""Maximum number of folders between a directory and the runs that are found in it."""
UNREADABLE = "unreadable"
NUMBERS = ("clients", "result (base)", "parameters", "on disk", "time")
"""Columns that are aligned to the right."""
STAMP_CHARACTERS = 15
WIDTH = 1000
"""Maximum width of the table in characters if the output is no terminal."""
NARROW = 120
"""Width of a terminal below which the table has fewer columns."""


@dataclass(frozen=True)
class Listed:
    """Row of the list; a value is None if the run does not have it."""

    path: str
    status: str
    reason: str
    method: str | None = None
    model: str | None = None
    clients: int | None = None
    finished: int | None = None
    metric: str | None = None
    dataset: str | None = None
    federated: float | None = None
    dense: float | None = None
    parameters: float | None = None
    bytes_on_disk: float | None = None
    is_adapter: bool = False
    seconds: float | None = None
    started: str | None = None


def find_runs(folder: Path, depth: int = DEPTH) -> Iterator[Path]:
    """Yield a directory if it is a run, otherwise the runs in it, by name.

    Run directories are not searched for further runs, and links are not followed.
    """
    if is_run(folder):
        yield folder
        return
    if depth == 0:
        return
    try:
        inner = sorted(
            entry.path for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False)
        )
    except OSError:
        # A folder of another user is no error of a list.
        return
    for path in inner:
        yield from find_runs(Path(path), depth - 1)


def runs_of(given: Sequence[str]) -> list[Path]:
    """Return the runs in the given directories, without repetitions.

    Raises InputError if a directory does not exist, or there is no run in it.
    """
    found: dict[Path, None] = {}
    for text in given:
        folder = at_home(text)
        if not folder.is_dir():
            raise InputError(f"{text}: is not a directory; name a run directory or one with runs")
        inner = list(find_runs(folder))
        if not inner:
            raise InputError(
                f"{text}: contains no run ({SUMMARY}); name a run directory or one with runs"
            )
        found |= dict.fromkeys(inner)
    return list(found)


def listed(folder: Path) -> Listed:
    """Return the row of a run; one that cannot be read has the status ``unreadable``."""
    try:
        status, reason = run_status(folder)
        if not (folder / SUMMARY).is_file():
            return Listed(str(folder), status, reason, started=_started(folder))
        run = open_run(folder)
        seconds = _seconds(run, has_ended=status not in (RUNNING, INTERRUPTED))
        return Listed(str(folder), status, reason, seconds=seconds, **_values(run))
    except EspalierError as error:
        return Listed(str(folder), UNREADABLE, str(error))


def _values(run: FinishedRun) -> Mapping[str, Any]:
    summary = run.summary
    quality = main_quality(run)
    written = size_of(run, FEDERATED)
    return {
        "method": summary.get("method"),
        "model": summary.get("model"),
        "clients": summary.get("num_clients"),
        "finished": summary.get("finished"),
        "metric": quality and quality.metric,
        "dataset": quality and quality.dataset,
        "federated": quality and quality.values.get(FEDERATED),
        "dense": quality and quality.values.get(DENSE),
        "parameters": written.parameters,
        "bytes_on_disk": written.num_bytes,
        "is_adapter": written.is_adapter,
        "started": _started(run.path),
    }


def _seconds(run: FinishedRun, *, has_ended: bool) -> float | None:
    """Return the seconds that a run has taken, up to the last checkpoint if it has not ended."""
    if has_ended:
        return run.summary.get("seconds")
    return run.json("seconds.json").get("run")


def _started(folder: Path) -> str | None:
    """Return the local time at which the name of the directory says that the run started."""
    try:
        moment = datetime.strptime(folder.absolute().name[:STAMP_CHARACTERS], STAMP)
    except ValueError:
        return None
    return moment.isoformat(sep=" ", timespec="minutes")


def table_of(rows: Sequence[Listed], common: str, width: int) -> Table:
    """Return the table of the list, with paths relative to the directory ``common``.

    In a narrow terminal it has fewer columns.
    """
    sizes = [
        Size(row.parameters, row.bytes_on_disk, ADAPTER if row.is_adapter else "").in_words()
        for row in rows
    ]
    columns: dict[str, list[str]] = {
        "run": [os.path.relpath(row.path, common) for row in rows],
        "status": [row.status for row in rows],
        "method": [row.method or "-" for row in rows],
        "model": [row.model or "-" for row in rows],
        "clients": [_clients(row) for row in rows],
        "result (base)": [_figure(row) for row in rows],
        "parameters": [parameters for parameters, _ in sizes],
        "on disk": [on_disk for _, on_disk in sizes],
        "time": ["-" if row.seconds is None else duration(row.seconds) for row in rows],
        "started": [row.started or "-" for row in rows],
    }
    if width < NARROW:
        for name in ("method", "model", "on disk", "started"):
            del columns[name]
    table = Table()
    for name in columns:
        table.add_column(name, overflow="fold", justify="right" if name in NUMBERS else "left")
    for cells in zip(*columns.values(), strict=True):
        table.add_row(*map(Text, cells))
    return table


def _clients(row: Listed) -> str:
    if row.clients is None:
        return "-"
    return str(row.clients) if row.finished is None else f"{row.finished} of {row.clients}"


def _figure(row: Listed) -> str:
    if row.federated is None or row.metric is None:
        return "-"
    dense = "" if row.dense is None else f" ({figure_text(row.metric, row.dense)})"
    return f"{row.dataset} {row.metric} {figure_text(row.metric, row.federated)}{dense}"


def console_for_tables() -> Console:
    """Return the console; in a file or a pipe, lines are not folded to the width of a terminal."""
    return Console() if sys.stdout.isatty() else Console(width=WIDTH, color_system=None)


def main(document: Mapping[str, Any]) -> int:
    """Print the list of runs.

    Parameters
    ----------
    document : ``directories``; ``json``, whether to print JSON instead of a table

    Returns
    -------
    int
        0, or 2 if a directory contains no run or a run cannot be read.
    """
    code = 0
    # By path, so that a run that two directories contain is listed once.
    rows: dict[str, Listed] = {}
    for directory in document["directories"]:
        try:
            rows |= {str(folder): listed(folder) for folder in runs_of([directory])}
        except EspalierError as error:
            tell(error)
            code = 2
    chosen = list(rows.values())
    if document["json"]:
        print(json.dumps([asdict(row) for row in chosen], indent=2))
    elif chosen:
        console = console_for_tables()
        common = os.path.commonpath([Path(row.path).absolute().parent for row in chosen])
        print(f"{common.rstrip(os.sep)}/", flush=True)
        console.print(table_of(chosen, common, console.width))
        for row in chosen:
            if row.status != COMPLETED:
                reason = f" ({printable(row.reason, LONGEST_REASON)})" if row.reason else ""
                print(f"{row.path}: {row.status}{reason}")
    return 2 if any(row.status == UNREADABLE for row in chosen) else code
