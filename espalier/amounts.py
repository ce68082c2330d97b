"""Readable text of counts, durations, sizes and tables: ``1 round``, ``15.3 MB``."""

from collections.abc import Sequence

MINUTE = 60
HOUR = 3600
DAY = 86_400
HUGE = 1e6
"""Smallest measured value in scientific notation, such as ``1.23e+12``."""


def count(number: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun: ``1 round``, ``1,200 rounds``, ``2 entries``.

    Parameters
    ----------
    plural : plural of the noun; empty: the noun and an s
    """
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"


def duration(seconds: float, *, tenths: bool = False) -> str:
    """Format a duration in one or two units: ``4 s``, ``112 s``, ``5 min 12 s``, ``3 h 5 min``.

    Parameters
    ----------
    tenths : whether to show tenths of a second below ten seconds, ``0.4 s``
    """
    if tenths and round(seconds, 1) < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    # Each unit is used from ``least`` seconds on, together with the next smaller one.
    for least, large, unit, small, next_unit in (
        (2 * DAY, DAY, "d", HOUR, "h"),
        (HOUR, HOUR, "h", MINUTE, "min"),
        (2 * MINUTE, MINUTE, "min", 1, "s"),
    ):
        if whole >= least:
            number, rest = divmod(round(whole / small) * small, large)
            return f"{number} {unit}" + (f" {rest // small} {next_unit}" if rest else "")
    return f"{whole} s"


def figure(value: float | None, digits: int = 2) -> str:
    """Return a number with ``digits`` decimal places, or a dash for None.

    Numbers from ``HUGE`` on have three significant digits.
    """
    if value is None:
        return "-"
    return f"{value:.3g}" if abs(value) >= HUGE else f"{value:.{digits}f}"


def size(num_bytes: float) -> str:
    """Format a number of bytes with three digits, in powers of 1000: ``999 B``, ``15.3 MB``."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= scale:
            value = num_bytes / scale
            return f"{value:.3g} {unit}" if value < 100 else f"{value:,.0f} {unit}"
    return f"{num_bytes:.0f} B"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table with left-aligned columns of equal width."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
