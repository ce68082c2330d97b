"""Directory of a sweep: a folder per cell with its runs, and a record of the cells' settings."""

import fcntl
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from espalier.errors import InputError
from espalier.launch.run import is_completed
from espalier.launch.sweep_grid import Cell
from espalier.settings.run import changes, of_the_result

RECORD = "sweep.json"
LOCK = "sweep.lock"


@contextmanager
def locked_sweep(folder: Path) -> Iterator[None]:
    """Create the directory of a sweep and hold its lock; the kernel releases it after a crash.

    Raises InputError if the directory cannot be written, or another sweep works there.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = open(folder / LOCK, "w")  # noqa: SIM115
    except OSError as error:
        raise InputError(
            f"--out {folder}: cannot be written ({error.strerror}); name another directory"
        ) from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(f"--out {folder}: another sweep works there; wait for it") from None
        except OSError:
            # A file system without locks cannot keep a second sweep out.
            pass
        yield


def require_same_cells(folder: Path, configs: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the record of the cells, with the given ones added.

    Raises InputError if a cell was started with other settings, or the record is damaged.

    Parameters
    ----------
    configs : flat configuration by name of the cell
    """
    _require_sweep(folder)
    cells = _recorded(folder / RECORD)
    for name, config in configs.items():
        now = of_the_result(config)
        if changed := changes(cells.setdefault(name, now), now):
            raise InputError(
                f"--out {folder}: cell {name} was started with other settings"
                f" ({'; '.join(changed)}); give the same settings, or name another directory"
            )
    return cells


def _require_sweep(folder: Path) -> None:
    """Raise InputError if a directory has content that no sweep wrote."""
    if folder.is_dir() and not (folder / RECORD).exists():
        others = sorted(entry.name for entry in folder.iterdir() if entry.name != LOCK)
        if others:
            raise InputError(
                f"--out {folder}: has {others[0]!r} and no {RECORD}, so it is not the directory of"
                " a sweep; name a new directory, or that of the sweep to continue"
            )


def _recorded(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        cells: dict[str, Any] = json.loads(path.read_text())["cells"]
        if not all(isinstance(config, dict) for config in cells.values()):
            raise ValueError
        return cells
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise InputError(
            f"{path}: is damaged; restore it from a backup, or name another directory with --out"
        ) from None


def write_record(folder: Path, cells: Mapping[str, Any]) -> None:
    """Write the record of the cells atomically; InputError if the disk refuses."""
    path = folder / RECORD
    written = path.with_suffix(".tmp")
    try:
        written.write_text(json.dumps({"cells": cells}, indent=1) + "\n")
        os.replace(written, path)
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror})") from None


def last_run(folder: Path) -> Path | None:
    """Return the newest run directory of a cell; None if no run has begun."""
    return max((file.parent for file in folder.glob("*/run.json")), default=None)


def words_of(cell: Cell, folder: Path) -> list[str] | None:
    """Return the words of a cell's next run in its folder; None if its last run is completed.

    A run that was interrupted or has failed is resumed.
    """
    words = [*cell.words, f"out-dir={folder}"]
    run = last_run(folder)
    if run is None:
        return words
    return None if is_completed(run) else [*words, f"resume-from={run}"]


def finished_of(folder: Path, names: Sequence[str]) -> dict[str, Path]:
    """Return the newest run of each cell by name, without cells that have none."""
    runs = {name: last_run(folder / name) for name in names}
    return {name: run for name, run in runs.items() if run is not None}
