"""Passages: the units of text that are split into calibration and held-out parts.

A passage is a run of lines without a blank line, or a part of a very long run
(``long_passages.py``). A hash of its words decides whether it is held out. The same passage is
therefore on the same side wherever it occurs, on every machine and in every order.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from espalier.data.long_passages import text_parts

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
