"""Status of a run, from its directory.

A run is running, interrupted, failed or completed. A server that is killed cannot record its end.
While it works, ``summary.json`` says ``running`` and the server holds the lock of the directory,
which the kernel releases however the server ends. A run that says ``running`` in a directory
without a held lock was therefore interrupted.

Does not cover: a directory on a network file system without locks between machines, checked on
another machine.
"""

from pathlib import Path

from espalier.amounts import count, duration
from espalier.errors import InputError
from espalier.identity.names import printable
from espalier.results.finished_run import read_summary
from espalier.storage.directory_lock import holder_of

SUMMARY = "summary.json"
RECORD = "run.json"
"""Name of the file that a run writes first."""
RUNNING = "running"
INTERRUPTED = "interrupted"
COMPLETED = "completed"
FAILED = "failed"
LONGEST_REASON = 300
"""Maximum number of characters of a reason in a list; ``summary.json`` has the full text."""
HOW_TO_TELL = (
    "a server works here as long as a process holds the file lock; otherwise the run was"
    " interrupted"
)
"""Reason in ``summary.json`` for the status ``running``."""
READ_KEYS = {"reason", "finished", "num_clients", "seconds"}
"""Keys of ``summary.json`` that a status needs."""


def is_run(folder: Path) -> bool:
    """Return whether a directory is a run directory."""
    return (folder / SUMMARY).is_file() or (folder / RECORD).is_file()


def run_status(folder: Path) -> tuple[str, str]:
    """Return the status of a run directory, and its reason in words.

    Raises InputError if the directory is not a run directory, or cannot be read.
    """
    # A run that has just begun, or was killed early, has no summary.
    if not (folder / SUMMARY).exists() and (folder / RECORD).is_file():
        return _at_work_or_interrupted(folder)
    document = read_summary(folder / SUMMARY)
    if not document.keys() >= READ_KEYS:
        raise InputError(f"{folder / SUMMARY}: lacks its status; restore it from a backup")
    status = str(document["status"])
    if status == RUNNING:
        return _at_work_or_interrupted(folder)
    if status == COMPLETED:
        finished = f"{document['finished']} of {count(document['num_clients'], 'client')}"
        return COMPLETED, f"{finished}, {duration(document['seconds'])}"
    return status, printable(str(document["reason"] or ""))


def _at_work_or_interrupted(folder: Path) -> tuple[str, str]:
    """Return the status of a run that has not recorded its end, by the lock of its directory."""
    if holder := holder_of(folder):
        return RUNNING, holder
    return INTERRUPTED, f"its server ended; continue with resume-from={folder}"
