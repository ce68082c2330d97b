"""Cuts within passages that are too long to be processed whole, as in text without blank lines.

A passage is cut at the last newline that leaves a part of at most ``LONGEST_PASSAGE`` bytes, else
at the last blank, else between two characters. The newline or blank belongs to neither part. A part
depends only on the text before it in the same passage. A file that is read in blocks is therefore
cut like a text in memory, for any size of the blocks.
"""

from collections.abc import Iterator

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
