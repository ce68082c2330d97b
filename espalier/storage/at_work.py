"""Who is at work for a run on this machine, and what they say of it: ``<state-dir>/at-work/<lineage>.log``.

Simulated clients share the machine and its workers with each other. Whoever works holds a shared lock on the run's file, and
writes lines to it; the server tries the lock, and shows the lines.
Covers: the lock ends with its process, however that ends; a line is written whole; for the owner's account alone.
Does not cover: other machines; a process that hangs, which counts as one that works.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from espalier.settings.mistakes import Mistake
from espalier.storage.private import OWNER_ONLY_FILE, is_ours, mark_as_ours, private_folder

FOLDER = "at-work"


class AtWork:
    """The work for one run (``lineage``) on this machine."""

    def __init__(self, root: Path, lineage: str) -> None:
        self._root = root
        self.path = root / FOLDER / f"{lineage}.log"
        self._read = self.path.stat().st_size if self.path.exists() else 0
        """Bytes; what was said before, in a part of the run that was interrupted, is old."""

    @contextmanager
    def working(self) -> Iterator[None]:
        """Count as at work until the end of the block; any number of processes may.

        Raises
        ------
        Mistake
            The file cannot be made.
        """
        folder = private_folder(self._root, FOLDER)
        if not is_ours(folder):
            mark_as_ours(folder)  # refuses what holds another program's files
        try:
            handle = os.open(self.path, os.O_WRONLY | os.O_CREAT, OWNER_ONLY_FILE)
        except OSError as error:
            raise Mistake(
                f"cannot write {self.path}: {error.strerror}; name another state-dir"
            ) from None
        try:
            fcntl.flock(handle, fcntl.LOCK_SH)
            yield
        finally:
            os.close(handle)

    def anybody(self) -> bool:
        """Whether somebody is at work now."""
        try:
            handle = os.open(self.path, os.O_RDONLY)
        except (FileNotFoundError, NotADirectoryError):
            return False
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(handle)
        return False

    def say(self, line: str) -> None:
        """Leave a line for the server; on a full disk it is lost, which costs no more than the line."""
        try:
            handle = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, OWNER_ONLY_FILE)
        except OSError:
            return
        try:
            os.write(handle, f"{line}\n".encode())
        except OSError:
            return
        finally:
            os.close(handle)

    def new_lines(self) -> list[str]:
        """What was said since the last call, whole lines only."""
        try:
            with open(self.path, "rb") as file:
                file.seek(self._read)
                said, end, _ = file.read().rpartition(b"\n")
        except (FileNotFoundError, NotADirectoryError):
            return []
        self._read += len(said) + len(end)
        return said.decode(errors="replace").splitlines()

    def remove(self) -> None:
        """Let go of the file, where it is one of ours."""
        if is_ours(self.path.parent):
            self.path.unlink(missing_ok=True)


def collect_old_work(root: Path, older_than: float) -> None:
    """Remove the files of runs that were not worked for since ``older_than`` (seconds since the epoch)."""
    for file in (root / FOLDER).glob("*.log") if is_ours(root / FOLDER) else ():
        if file.stat().st_mtime < older_than:
            file.unlink(missing_ok=True)
