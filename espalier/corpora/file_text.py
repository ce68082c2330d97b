"""The text of a file as it is, of which a stretch is in memory at a time.

Covers: a file of any size; one that is empty or not UTF-8 is told when it is opened, one that is changed afterwards when it is
read again.
"""

import os
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

from espalier.corpora.files import behind_mark, blocks, not_utf8, opened
from espalier.corpora.long_passages import full_parts
from espalier.settings.mistakes import Mistake


class FileText(Sequence[str]):
    """Stretches of a UTF-8 file, which joined are its text without a mark of the byte order.

    They end where a very long passage would be cut, the newline or blank included, so that a tokenizer can be stopped there.

    Parameters
    ----------
    path : the file
    keys : the settings to blame if it cannot be read

    Raises
    ------
    Mistake
        The file is missing, is not a file, is empty, or is not UTF-8.
    """

    def __init__(self, path: str, keys: str) -> None:
        self._path = path
        self._keys = keys
        with opened(path, keys) as file:
            self._state = _state(file)
            self._places = list(self._checked(file))

    def __len__(self) -> int:
        return len(self._places) - 1

    def __getitem__(self, place: Any) -> Any:
        """One stretch, or a list of some that follow one another."""
        if isinstance(place, slice):
            first, end, _ = place.indices(len(self))
            return list(self._read(first, end))
        (stretch,) = self._read(range(len(self))[place], range(len(self))[place] + 1)
        return stretch

    def __iter__(self) -> Iterator[str]:
        return self._read(0, len(self))

    def _read(self, first: int, end: int) -> Iterator[str]:
        with opened(self._path, self._keys) as file:
            for number in range(first, end):
                start, behind = self._places[number : number + 2]
                data = os.pread(file.fileno(), behind - start, start)
                if _state(file) != self._state:
                    raise Mistake(
                        f"{self._path}: the file was changed while it was read; start the run again"
                        " when it is complete"
                    )
                yield data.decode()

    def _checked(self, file: BinaryIO) -> Iterator[int]:
        """Yield where each stretch begins, and where the last one ends."""
        start = behind_mark(file)
        waiting = bytearray()
        empty = True
        for block in blocks(file):
            waiting += block
            place = 0
            for first, _, following in full_parts(waiting, 0, len(waiting)):
                yield start + first
                empty &= not self._decoded(waiting[first:following], start + first).strip()
                place = following
            del waiting[:place]
            start += place
        if waiting:
            yield start
            empty &= not self._decoded(waiting, start).strip()
        if empty:
            raise Mistake(f"{self._path}: the file is empty; name a file with text in it")
        yield start + len(waiting)

    def _decoded(self, data: bytearray, start: int) -> str:
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise not_utf8(self._path, start, error) from None


def _state(file: BinaryIO) -> tuple[int, ...]:
    """By what a change of the file is noticed."""
    found = os.fstat(file.fileno())
    return found.st_size, found.st_ino, found.st_mtime_ns, found.st_ctime_ns
