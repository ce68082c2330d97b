"""Paired comparison of the arms of a study, which share seeds and text.

The result is a difference per seed, its sign, and a confidence interval.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import fmean, stdev

BySeed = Mapping[str, float]
"""Values of one arm in one column, by seed."""
Arms = Mapping[tuple[str, str], BySeed]
"""Values by (arm, column)."""

EXPLANATION = (
    "Mean over seeds ± half of its 95% interval (Student's t); in brackets a sign per seed, −"
    " if the first is lower."
)


@dataclass(frozen=True)
class Pair:
    """Two arms to compare: ``first`` minus ``second``."""

    first: str
    second: str


@dataclass(frozen=True)
class Difference:
    """Differences of two arms over the seeds that both have."""

    by_seed: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Mean over seeds."""
        return fmean(self.by_seed)

    @property
    def half_width(self) -> float | None:
        """Half of the 95% interval of the mean, or None with fewer than two seeds."""
        number = len(self.by_seed)
        if number < 2:
            return None
        # Imported here: tables without intervals need no SciPy.
        from scipy.stats import t

        return float(t.ppf(0.975, number - 1)) * stdev(self.by_seed) / sqrt(number)

    @property
    def signs(self) -> str:
        """Sign of each seed's difference, as one string."""
        return "".join("−" if value < 0 else "+" if value > 0 else "0" for value in self.by_seed)

    def text(self, digits: int) -> str:
        """Return the text for a table cell."""
        number = f"{self.mean:+.{digits}f}".replace("-", "−")
        interval = "" if self.half_width is None else f" ± {self.half_width:.{digits}f}"
        return f"{number}{interval} ({self.signs})"


def difference(arms: Arms, pair: Pair, column: str) -> Difference | None:
    """Return the difference of a pair in a column; None if they share no seed there."""
    first = arms.get((pair.first, column), {})
    second = arms.get((pair.second, column), {})
    seeds = sorted(first.keys() & second.keys())
    return Difference(tuple(first[seed] - second[seed] for seed in seeds)) if seeds else None


def paired_table(
    arms: Arms, pairs: Sequence[Pair], columns: Sequence[str], title: str, digits: int | None = None
) -> list[str]:
    """Return a Markdown table with a row per pair that has values.

    ``digits`` is the number of decimals; by default 2, or 1 if values reach 1000.
    """
    lines = []
    for pair in pairs:
        found = [difference(arms, pair, column) for column in columns]
        if any(found):
            shown = _digits(arms) if digits is None else digits
            cells = ["" if one is None else one.text(shown) for one in found]
            lines.append(f"| {pair.first} − {pair.second} | {' | '.join(cells)} |")
    if not lines:
        return []
    head = [
        f"### {title}: paired differences",
        "",
        EXPLANATION,
        "",
        f"| | {' | '.join(columns)} |",
        "|---|" + "---|" * len(columns),
    ]
    return [*head, *lines, ""]


def _digits(arms: Arms) -> int:
    largest = max(value for by_seed in arms.values() for value in by_seed.values())
    return 1 if largest >= 1000 else 2
