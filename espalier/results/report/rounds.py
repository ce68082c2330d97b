"""Quality by round, as far as the server measured it between rounds."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from espalier.results.finished_run import FinishedRun
from espalier.results.report.comparison import NAMES

FILE = "rounds.json"


@dataclass
class Curve:
    """Values of one measure by round."""

    title: str
    points: dict[str, dict[int, float]] = field(default_factory=dict)
    """Round -> value, by series: one for the result, or one for each client's model."""


def curves_of(run: FinishedRun) -> list[Curve]:
    """Return the curves of a run; empty if the server measured nothing between rounds."""
    curves: dict[str, Curve] = {}
    for entry in run.json(FILE).get("rounds", ()):
        for group in ("perplexity", "scores"):
            for name, value in entry.get(group, {}).items():
                title = (
                    f"{NAMES[group]} on {name}"
                    if group in NAMES
                    else f"{NAMES.get(name, name)} on {run.setting('task.name')}"
                )
                curve = curves.setdefault(f"{group}/{name}", Curve(title))
                _add(curve, int(entry["round"]), value)
    return [curve for curve in curves.values() if curve.points]


def _add(curve: Curve, number: int, value: float | Mapping[str, float | None] | None) -> None:
    """Add the values of a round; values that were not finite are null in the file."""
    of_series = value if isinstance(value, Mapping) else {"": value}
    for client, one in of_series.items():
        if one is not None:
            name = f"client {client}" if client else "federated"
            curve.points.setdefault(name, {})[number] = one
