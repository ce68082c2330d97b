"""Cells of Markdown tables: means and spreads over seeds."""

from collections.abc import Sequence
from statistics import fmean, stdev


def mean_and_spread(values: Sequence[float], digits: int, separator: str = "") -> str:
    """Return ``mean ± standard deviation``; a single value has no spread, and none is empty.

    Parameters
    ----------
    separator : ``","`` between thousands, or nothing
    """
    if not values:
        return ""
    form = f"{separator}.{digits}f"
    spread = f" ± {stdev(values):{form}}" if len(values) > 1 else ""
    return f"{fmean(values):{form}}{spread}"


def head_of(columns: Sequence[str], numbers: bool = False, first: str = "") -> list[str]:
    """Return the first two lines of a table.

    Parameters
    ----------
    columns : titles of the columns after the first
    numbers : align these columns to the right
    first : title of the first column
    """
    line = "---:|" if numbers else "---|"
    return [f"| {first}{' ' * bool(first)}| {' | '.join(columns)} |", "|---|" + line * len(columns)]
