"""Readable formats for counts, durations and sizes: ``1 round``, ``1 h 30 min``, ``15.3 MB``."""

from collections.abc import Iterator, Sequence

MINUTE = 60
HOUR = 3600
DAY = 86_400
TENTHS_BELOW = 10.0
"""Duration in seconds below which tenths of a second can be shown."""
MINUTES_FROM = 2 * MINUTE
HOURS_FROM = HOUR
DAYS_FROM = 2 * DAY
"""Durations in seconds from which ``duration`` uses a larger unit and the next smaller one."""
SIZES = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
LARGE = 100
"""Value from which a size is shown without decimal places."""


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
    if tenths and round(seconds, 1) < TENTHS_BELOW:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for least, large, unit, small, next_unit in (
        (DAYS_FROM, DAY, "d", HOUR, "h"),
        (HOURS_FROM, HOUR, "h", MINUTE, "min"),
        (MINUTES_FROM, MINUTE, "min", 1, "s"),
    ):
        if whole >= least:
            number, rest = divmod(round(whole / small) * small, large)
            return f"{number} {unit}" + (f" {rest // small} {next_unit}" if rest else "")
    return f"{whole} s"


def size(num_bytes: float) -> str:
    """Format a number of bytes with three digits, in powers of 1000: ``999 B``, ``15.3 MB``."""
    for unit, scale in SIZES:
        if num_bytes >= scale:
            value = num_bytes / scale
            return f"{value:.3g} {unit}" if value < LARGE else f"{value:,.0f} {unit}"
    return f"{num_bytes:.0f} B"


def table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table whose rows have the same number of cells."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
