"""Simulated disk that is full for files below some path."""

import errno
import os
import tempfile
from typing import Any

import pytest


class FullDisk:
    """Context in which writes fail with ENOSPC while ``full`` is true.

    It affects making, replacing and appending to files whose path contains ``part_of_path``.
    """

    def __init__(self, part_of_path: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.part_of_path = part_of_path
        self.full = False
        self._monkeypatch = monkeypatch

    def __enter__(self) -> "FullDisk":
        make = tempfile.mkstemp
        write = os.write

        def mkstemp(*arguments: Any, **named: Any) -> Any:
            self._require_space(str(named["dir"]))
            return make(*arguments, **named)

        def append(handle: int, data: bytes) -> int:
            self._require_space(os.readlink(f"/proc/self/fd/{handle}"))
            return write(handle, data)

        self._monkeypatch.setattr("espalier.storage.atomic.tempfile.mkstemp", mkstemp)
        self._monkeypatch.setattr("espalier.storage.atomic.os.write", append)
        return self

    def __exit__(self, *_: object) -> None:
        self.full = False

    def _require_space(self, path: str) -> None:
        if self.full and self.part_of_path in path:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
