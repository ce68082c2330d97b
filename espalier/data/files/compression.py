"""Bytes of a file, unpacked if it is compressed with gzip or Zstandard, as its first bytes tell."""

import codecs
import gzip
import os
import zlib
from importlib import import_module
from typing import Any, BinaryIO

from espalier.errors import InputError

GZIP = b"\x1f\x8b"
ZSTANDARD = b"\x28\xb5\x2f\xfd"
HEAD_BYTES = 512
"""Number of bytes at the beginning of a file that tell its kind."""


class Bytes:
    """Bytes of an open file, read once from the beginning to the end.

    Raises InputError if the file is compressed, and the beginning of the compressed data is
    damaged.

    Parameters
    ----------
    file : the file; it stays open as long as this object is used
    """

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.name = file.name
        """Path of the file, for errors."""
        head = file.read(len(ZSTANDARD))
        file.seek(0)
        self.packed = {GZIP: "gzip", ZSTANDARD: "Zstandard"}.get(
            head if head == ZSTANDARD else head[: len(GZIP)], ""
        )
        """Name of the compression; empty if there is none."""
        self._stream: Any = file
        if self.packed == "gzip":
            self._stream = gzip.GzipFile(fileobj=file)
        elif self.packed:
            pyarrow = import_library("pyarrow")
            self._stream = pyarrow.CompressedInputStream(pyarrow.PythonFile(file, "r"), "zstd")
        self._place = 0
        self.head = b""
        """First bytes, which the first ``read`` returns again."""
        self.head = self.read(HEAD_BYTES)
        self._place = 0

    def read(self, size: int) -> bytes:
        """Return up to ``size`` bytes; fewer only at the end of the file."""
        data = bytearray()
        if self._place < len(self.head):
            data += self.head[self._place : self._place + size]
        try:
            while len(data) < size and (more := self._stream.read(size - len(data))):
                data += more
        except (OSError, EOFError, zlib.error) as error:
            if not self.packed:
                raise
            raise InputError(
                f"{self.name}: the {self.packed} data are damaged or end early"
                f" ({type(error).__name__}, near byte {self.file.tell()} of the file); copy the"
                " file again"
            ) from None
        self._place += len(data)
        return bytes(data)

    def tell(self) -> int:
        """Return the number of bytes that were read."""
        return self._place

    def skip_mark(self) -> int:
        """Skip a byte order mark at the beginning; return the offset of the text."""
        return len(self.read(len(codecs.BOM_UTF8))) if self.head.startswith(codecs.BOM_UTF8) else 0

    def progress(self) -> tuple[int, int]:
        """Return how many bytes of the file on disk were read, and how many it has."""
        return self.file.tell(), os.fstat(self.file.fileno()).st_size


def import_library(name: str, extra: str = "hub") -> Any:
    """Import an optional library, which the installation contains with this extra.

    Raises
    ------
    InputError
        The library is not installed; the error names the command that installs it.
    """
    try:
        return import_module(name)
    except ImportError:
        raise InputError(
            f"the library '{name.partition('.')[0]}' is not installed, which this kind of data"
            f" needs; run: pip install -e '.[{extra}]'"
        ) from None
