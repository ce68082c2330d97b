"""Number format for tables that people read."""

HUGE = 1e6
"""Smallest number in scientific notation, such as ``1.23e+12``."""


def figure(value: float | None, digits: int = 2) -> str:
    """Return a number with ``digits`` decimal places, or a dash for None.

    Numbers from ``HUGE`` on have three significant digits.
    """
    if value is None:
        return "-"
    return f"{value:.3g}" if abs(value) >= HUGE else f"{value:.{digits}f}"
