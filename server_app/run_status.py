"""Status of a run from its directory (``espalier status``).

A run is running, interrupted, failed or completed. A server that is killed cannot record that.
While it works, ``summary.json`` says ``running`` and the server holds the lock of the directory,
which the kernel releases however the server ends. A run that says ``running`` in a directory
without a held lock was therefore interrupted.

Does not cover: a directory on a network file system without locks between machines, checked on
another machine.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from espalier.amounts import count, duration
from espalier.environment.bounded_json import read_json
from espalier.environment.home_folder import at_home
from espalier.errors import EspalierError, InputError
from espalier.identity.printable import printable
from espalier.storage.directory_lock import holder_of

RUNNING = "running"
INTERRUPTED = "interrupted"
COMPLETED = "completed"
HOW_TO_TELL = (
    "a server works here as long as a process holds the file lock; otherwise the run was"
    " interrupted"
)
"""Reason in ``summary.json`` for the status ``running``."""


def run_status(folder: Path) -> tuple[str, str]:
    """Return the status of a run directory, and its reason in words.

    Raises
    ------
    InputError
        The directory is not a run directory, or cannot be read.
    """
    document = _summary(folder)
    status = str(document["status"])
    reason = document["reason"]
    if status == RUNNING:
        if holder := holder_of(folder):
            return RUNNING, holder
        return INTERRUPTED, f"its server ended; continue with resume-from={folder}"
    if status == COMPLETED:
        finished = f"{document['finished']} of {count(document['num_clients'], 'client')}"
        return COMPLETED, f"{finished}, {duration(document['seconds'])}"
    return status, printable(str(reason or ""))


def _summary(folder: Path) -> Mapping[str, Any]:
    path = folder / "summary.json"
    try:
        document = read_json(path.read_text())
        if not isinstance(document, dict) or not {
            "status",
            "reason",
            "finished",
            "num_clients",
            "seconds",
        } <= set(document):
            raise ValueError
        return document
    except OSError as error:
        raise InputError(
            f"{folder}: is not a run directory ({path.name}: {error.strerror}); name a directory"
            " in runs/"
        ) from None
    except (ValueError, RecursionError):
        raise InputError(f"{path}: is not the summary of a run; restore it from a backup") from None


def main(folders: Sequence[str]) -> int:
    """Print one line per run directory.

    Returns
    -------
    int
        0, or 2 if one of them is not a run directory.
    """
    code = 0
    for folder in folders:
        try:
            status, reason = run_status(at_home(folder))
            print(f"{folder}: {status}{f' ({reason})' if reason else ''}", flush=True)
        except EspalierError as error:
            print(f"espalier: {error}", file=sys.stderr)
            code = 2
    return code
