"""Passages: the units of text that are split into calibration and held-out parts.

A passage is a run of lines without a blank line, or a part of a very long run. A hash of its words
decides whether it is held out. The same passage is therefore on the same side wherever it occurs,
on every machine and in every order.

A passage is cut at the last newline that leaves a part of at most ``LONGEST_PASSAGE`` bytes, else
at the last blank, else between two characters. The newline or blank belongs to neither part. A part
depends only on the text before it in the same passage. A file that is read in blocks is therefore
cut like a text in memory, for any size of the blocks.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

LONGEST_PASSAGE = 1 << 16
"""Maximum size of a passage in bytes of UTF-8, about ten thousand words."""
BLANK = b" \t\r\n"
MAX_BYTES = 4
"""Maximum number of bytes of a character in UTF-8."""


def full_parts(data: bytes | bytearray, first: int, filled: int) -> Iterator[tuple[int, int, int]]:
    """Cut parts off the beginning of a passage while the rest is too long.

    Parameters
    ----------
    first : start of the passage in ``data``
    filled : end of the passage without the blanks that may follow

    Yields
    ------
    (begin, end, following) : start and end of each part, and start of the rest
    """
    while filled - first > LONGEST_PASSAGE:
        end, following = _cut(data, first)
        yield first, end, following
        first = following


def parts(data: bytes | bytearray, first: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield start and end of each part of a whole passage; a short passage is one part."""
    if end - first > LONGEST_PASSAGE:
        filled = first + len(data[first:end].rstrip(BLANK))
        for begin, behind, following in full_parts(data, first, filled):
            yield begin, behind
            first = following
    yield first, end


def text_parts(passage: str) -> Iterator[str]:
    """Yield the parts of a passage in memory."""
    # Short enough, whatever characters it consists of.
    if MAX_BYTES * len(passage) <= LONGEST_PASSAGE:
        yield passage
        return
    data = passage.encode()
    for first, end in parts(data, 0, len(data)):
        yield data[first:end].decode()


def _cut(data: bytes | bytearray, first: int) -> tuple[int, int]:
    """Return the end of the first part of a passage that is too long, and the start of the rest."""
    limit = first + LONGEST_PASSAGE
    end = data.rfind(b"\n", first, limit + 1)
    if end <= first:
        end = max(data.rfind(b" ", first, limit + 1), data.rfind(b"\t", first, limit + 1))
    if end > first:
        return end, end + 1
    end = limit
    # Bytes ``10xxxxxx`` continue a character of UTF-8, so the cut moves before its first byte.
    while end > max(first + 1, limit - MAX_BYTES) and data[end] & 0xC0 == 0x80:
        end -= 1
    return end, end


HELD_OUT_PERCENT = 10
"""Percentage of passages that are held out from calibration and training."""

_BLANK_LINES = re.compile(r"\n(?:[ \t]*\n)+")


def passages(text: str) -> Iterator[str]:
    """Yield the passages of a text, without surrounding blank space."""
    for passage in _BLANK_LINES.split(f"\n{text}".replace("\r\n", "\n")):
        for part in text_parts(passage.strip("\n")):
            if part := part.strip("\n").rstrip():
                yield part


def digest(passage: str) -> bytes:
    """Return the SHA-256 of a passage's words; differences in blank space do not matter."""
    return hashlib.sha256(" ".join(passage.split()).encode()).digest()


def is_held_out(passage: str) -> bool:
    """Return whether the passage is held out (see ``HELD_OUT_PERCENT``)."""
    return int.from_bytes(digest(passage)[:8], "big") % 100 < HELD_OUT_PERCENT


def digests_are_held_out(numbers: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Apply ``is_held_out`` to many passages, given the first 64 bits of each hash."""
    held_out: NDArray[np.bool_] = numbers % 100 < HELD_OUT_PERCENT
    return held_out


def split(texts: Iterable[str]) -> tuple[list[str], list[str]]:
    """Split texts into calibration and held-out passages.

    Each passage appears once, in order of its first occurrence.

    Returns
    -------
    (calibration, held_out) : two lists of passages that have no passage in common
    """
    calibration: list[str] = []
    held_out: list[str] = []
    seen: set[bytes] = set()
    for text in texts:
        for passage in passages(text):
            if (key := digest(passage)) not in seen:
                seen.add(key)
                (held_out if is_held_out(passage) else calibration).append(passage)
    return calibration, held_out
