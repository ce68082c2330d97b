"""Activity and progress of the clients of a run on this machine.

Every run has a file ``<state-dir>/at-work/<lineage>.log``. Simulated clients share the machine and
its worker processes. A process that works for a client holds a shared lock on the file and appends
progress lines to it. The server tests the lock and shows the lines.

Covers: the lock ends with its process, however the process ends; each line is written by one system
call; only the owner's account can read the file.
Does not cover: clients on other machines; a process that hangs, which still counts as working.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from espalier.errors import InputError
from espalier.storage.client_state import is_ours, marked_folder
from espalier.storage.directory_lock import OWNER_ONLY_FILE

FOLDER = "at-work"


class AtWork:
    """Activity of a run (``lineage``) on this machine; ``root`` is the node's ``state-dir``."""

    def __init__(self, root: Path, lineage: str) -> None:
        self._root = root
        self.path = root / FOLDER / f"{lineage}.log"
        self._read = self.path.stat().st_size if self.path.exists() else 0
        """Number of bytes already read.

        Lines from before an interruption of the run are old, so they are skipped.
        """

    @contextmanager
    def working(self) -> Iterator[None]:
        """Count this process, next to any others, as working until the end of the block.

        Raises InputError if the file cannot be created, or the directory holds files of another
        program.
        """
        marked_folder(self._root, FOLDER)
        try:
            handle = os.open(self.path, os.O_WRONLY | os.O_CREAT, OWNER_ONLY_FILE)
        except OSError as error:
            raise InputError(
                f"cannot write {self.path}: {error.strerror}; name another state-dir"
            ) from None
        try:
            # Shared: several clients work at the same time.
            fcntl.flock(handle, fcntl.LOCK_SH)
            yield
        finally:
            # Closing releases the lock.
            os.close(handle)

    def anybody(self) -> bool:
        """Return True if a process is working for the run now."""
        try:
            handle = os.open(self.path, os.O_RDONLY)
        except (FileNotFoundError, NotADirectoryError):
            return False
        try:
            # An exclusive lock fails as long as any worker holds a shared one.
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(handle)
        return False

    def say(self, line: str) -> None:
        """Append a progress line for the server; on an error, such as a full disk, drop it."""
        opener = partial(os.open, mode=OWNER_ONLY_FILE)
        # Appending by one unbuffered call, since several processes write.
        with (
            suppress(OSError),
            open(self.path, "ab", buffering=0, opener=opener) as file,
        ):
            file.write(f"{line}\n".encode())

    def new_lines(self) -> list[str]:
        """Return the complete lines that were written since the last call."""
        try:
            with open(self.path, "rb") as file:
                file.seek(self._read)
                # An incomplete last line is read by the next call.
                text, end, _ = file.read().rpartition(b"\n")
        except (FileNotFoundError, NotADirectoryError):
            return []
        self._read += len(text) + len(end)
        return text.decode(errors="replace").splitlines()

    def remove(self) -> None:
        """Delete the file if its directory was created by Espalier."""
        if is_ours(self.path.parent):
            self.path.unlink(missing_ok=True)


def collect_old_work(root: Path, older_than: float) -> None:
    """Delete the files of runs last used before ``older_than``, in seconds since the epoch."""
    for file in (root / FOLDER).glob("*.log") if is_ours(root / FOLDER) else ():
        # The file's time is that of its last line or use.
        if file.stat().st_mtime < older_than:
            file.unlink(missing_ok=True)
