"""Append-only files of one JSON object per line: metrics, byte ledger, egress log."""

import errno
import json
import os
from pathlib import Path
from typing import Any

from espalier.settings.bounded_json import read_json


class JsonLines:
    """Appends a line at a time; a line is written whole, by one system call, and never behind half of another one."""

    def __init__(self, path: Path, mode: int = 0o644) -> None:
        self.path = path
        self._mode = mode

    def append(self, entry: dict[str, Any]) -> None:
        """Append one entry; OSError, with the path, if it could not be written whole, and then nothing of it is there."""
        line = json.dumps(entry, allow_nan=False) + "\n"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, self._mode)
        try:
            size = os.fstat(handle).st_size
            # By a machine that went down.
            torn = size > 0 and os.pread(handle, 1, size - 1) != b"\n"
            data = (b"\n" if torn else b"") + line.encode()
            if os.write(handle, data) != len(data):
                os.ftruncate(handle, size)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from error
        finally:
            os.close(handle)

    def entries(self) -> list[dict[str, Any]]:
        """All entries; none if nothing was appended yet."""
        if not self.path.exists():
            return []
        return [read_json(line) for line in self.path.read_text().splitlines() if line]
