"""Cache of what is read from a model directory, as long as its files do not change."""

import os
from collections.abc import Callable
from functools import lru_cache, wraps
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


def cached_while_unchanged(maxsize: int) -> Callable[[Callable[[Path], T]], Callable[[Path], T]]:
    """Cache the last results of a function of a directory within this process.

    The function is called again when a file of the directory was changed, added or removed.
    """

    def decorate(read: Callable[[Path], T]) -> Callable[[Path], T]:
        @lru_cache(maxsize)
        def cached(directory: Path, _: object) -> T:
            return read(directory)

        @wraps(read)
        def read_once(directory: Path) -> T:
            return cached(directory, _stamps(directory) if directory.is_dir() else ())

        return read_once

    return decorate


def _stamps(directory: Path) -> tuple[tuple[str, int, int, int], ...]:
    """Return values that change when a file of a directory changes."""
    stamps = []
    for entry in os.scandir(directory):
        # For a dangling link they describe the link itself.
        stat = entry.stat(follow_symlinks=os.path.exists(entry.path))
        stamps.append((entry.name, stat.st_ino, stat.st_size, stat.st_mtime_ns))
    return tuple(sorted(stamps))
