"""Append-only files with one JSON object per line: metrics, byte ledger, egress log."""

import errno
import json
import os
from pathlib import Path
from typing import Any

from espalier.environment.bounded_json import read_json


class JsonLines:
    """Append-only file of JSON objects.

    A line is written whole, by one system call, and never joined to an incomplete line before it.

    Parameters
    ----------
    path
        The file. Missing parent directories are created with the first entry.
    mode
        Permissions of a new file.
    """

    def __init__(self, path: Path, mode: int = 0o644) -> None:
        self.path = path
        self._mode = mode

    def append(self, entry: dict[str, Any]) -> None:
        """Append one entry.

        Raises
        ------
        OSError
            If the entry could not be written whole; the error has the path. Nothing of the entry is
            then in the file.
        """
        line = json.dumps(entry, allow_nan=False) + "\n"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, self._mode)
        try:
            size = os.fstat(handle).st_size
            # A machine that went down may leave an incomplete last line.
            torn = size > 0 and os.pread(handle, 1, size - 1) != b"\n"
            data = (b"\n" if torn else b"") + line.encode()
            # One system call, so that lines of several processes do not mix.
            if os.write(handle, data) != len(data):
                os.ftruncate(handle, size)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from error
        finally:
            os.close(handle)

    def entries(self) -> list[dict[str, Any]]:
        """Return all entries; an empty list if the file does not exist."""
        if not self.path.exists():
            return []
        return [read_json(line) for line in self.path.read_text().splitlines() if line]
