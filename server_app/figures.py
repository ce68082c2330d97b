"""A figure as a person reads it."""

HUGE = 1e6
"""From here on a figure is written short, as ``1.23e+12``."""


def figure(value: float | None, digits: int = 2) -> str:
    """With so many digits behind the point, or with three in all where it is huge; a dash where there is none."""
    if value is None:
        return "-"
    return f"{value:.3g}" if abs(value) >= HUGE else f"{value:.{digits}f}"
