"""Text of a file, read in parts so that memory stays bounded.

Covers: files of any size. An empty file or one that is not UTF-8 is reported when it is opened. A
later change of the file is reported when it is read again.
"""

import os
from collections.abc import Iterator, Sequence
from typing import Any

from espalier.data.files.compression import Bytes
from espalier.data.files.files import blocks, not_utf8, opened, require_text
from espalier.data.files.rows import status_of
from espalier.data.passages import full_parts
from espalier.environment.paths import at_home
from espalier.errors import InputError


class FileText(Sequence[str]):
    """Consecutive parts of a UTF-8 file; joined, they are its text without a byte order mark.

    A part ends where a very long passage would be cut (see ``passages``) and includes the newline
    or blank at that place, so that a tokenizer can stop there. Raises InputError if the file is
    missing, is not a regular file, is empty, or is not UTF-8.

    Parameters
    ----------
    path : the file
    keys : settings that name the file, for errors
    """

    def __init__(self, path: str, keys: str) -> None:
        self._path = path
        self._keys = keys
        with opened(path, keys) as file:
            if file.packed:
                raise InputError(
                    f"{path}: the file is compressed ({file.packed}); unpack it, and name the"
                    f" unpacked file in {keys}"
                )
            require_text(file)
            self._state = status_of(at_home(path))
            self._places = list(self._checked(file))

    def __len__(self) -> int:
        return len(self._places) - 1

    def __getitem__(self, place: Any) -> Any:
        """Return one part, or a list of the parts of a slice."""
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
                data = os.pread(file.file.fileno(), behind - start, start)
                # Checked after reading, so that no part is from a changed file.
                if status_of(at_home(self._path)) != self._state:
                    raise InputError(
                        f"{self._path}: the file changed while it was read; start the run again"
                        " when the file is complete"
                    )
                yield data.decode()

    def _checked(self, file: Bytes) -> Iterator[int]:
        """Yield the start of each part, and finally the end of the last one."""
        start = file.skip_mark()
        waiting = bytearray()
        empty = True
        for block in blocks(file):
            # Only what cannot be cut yet stays in memory.
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
            raise InputError(f"{self._path}: the file is empty; name a file that contains text")
        yield start + len(waiting)

    def _decoded(self, data: bytearray, start: int) -> str:
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise not_utf8(self._path, start, error) from None
