"""Where a passage is cut that is too long to be handled whole, as in a text that has no blank lines.

At the last newline that leaves the part no longer than ``LONGEST_PASSAGE``; where a line is longer, at its last blank; where
there is none, between two characters. The newline or blank itself belongs to neither part. A part depends on what stands before
it in its passage alone, so a file that is read in blocks is cut as one in memory, however large the blocks are.
"""

from collections.abc import Iterator

LONGEST_PASSAGE = 1 << 16
"""Bytes of a passage, in UTF-8; some ten thousand words."""
BLANK = b" \t\r\n"
MOST_BYTES = 4
"""Of a character in UTF-8."""


def full_parts(data: bytes | bytearray, first: int, filled: int) -> Iterator[tuple[int, int, int]]:
    """Cut off parts as long as what is left is too long.

    Parameters
    ----------
    first, filled : where a passage begins in ``data``, and behind which of its bytes nothing but blanks is known to follow

    Yields
    ------
    (begin, end, following) : of each part, and where what is left begins
    """
    while filled - first > LONGEST_PASSAGE:
        end, following = _cut(data, first)
        yield first, end, following
        first = following


def parts(data: bytes | bytearray, first: int, end: int) -> Iterator[tuple[int, int]]:
    """Where each part of a whole passage begins and ends; a passage that is not too long is one part."""
    if end - first > LONGEST_PASSAGE:
        filled = first + len(data[first:end].rstrip(BLANK))
        for begin, behind, following in full_parts(data, first, filled):
            yield begin, behind
            first = following
    yield first, end


def text_parts(passage: str) -> Iterator[str]:
    """The same of a passage in memory."""
    if MOST_BYTES * len(passage) <= LONGEST_PASSAGE:
        yield passage
        return
    data = passage.encode()
    for first, end in parts(data, 0, len(data)):
        yield data[first:end].decode()


def _cut(data: bytes | bytearray, first: int) -> tuple[int, int]:
    """Where the first part ends of what is too long, and where the rest begins."""
    limit = first + LONGEST_PASSAGE
    end = data.rfind(b"\n", first, limit + 1)
    if end <= first:
        end = max(data.rfind(b" ", first, limit + 1), data.rfind(b"\t", first, limit + 1))
    if end > first:
        return end, end + 1
    end = limit
    # Within a character.
    while end > max(first + 1, limit - MOST_BYTES) and data[end] & 0xC0 == 0x80:
        end -= 1
    return end, end
