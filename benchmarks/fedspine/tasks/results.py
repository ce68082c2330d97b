"""Measurements of the task study: scores, curves between rounds, and devices."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.fedspine.tasks import cuts
from benchmarks.fedspine.tasks.compared_methods import (
    AT_ONCE_FIRST,
    AT_ONCE_LAST,
    BANDIT,
    CHOICES,
    UNPRUNED,
)
from benchmarks.fedspine.tasks.runs import BY_SAMPLES, KEYS, Files
from benchmarks.reporting.rows import Row

METHODS = (*UNPRUNED, *CHOICES, *BY_SAMPLES, cuts.FIRST, *cuts.LAST, AT_ONCE_FIRST, AT_ONCE_LAST)
UNPRUNED_SHARE = "0.0"


@dataclass(frozen=True)
class Found:
    """Measurements of the study, and functions that interpret them."""

    rows: Sequence[Row]
    curves: Sequence[Row]
    metric: str
    devices: Sequence[Row] = ()

    def better(self, scores: Sequence[float]) -> float:
        """Return the best of some scores."""
        return min(scores) if self.metric == "loss" else max(scores)

    def reaches(self, score: float, target: float) -> bool:
        """Return whether a score is at least as good as the target."""
        return score <= target if self.metric == "loss" else score >= target

    def groups(self) -> list[tuple[str, str]]:
        """Return the pairs of fleet and pruning ratio that have rows with pruning."""
        return list(
            dict.fromkeys(
                (row["fleet"], row["share"]) for row in self.rows if row["share"] != UNPRUNED_SHARE
            )
        )

    def of_group(self, rows: Sequence[Row], fleet: str, share: str) -> list[Row]:
        """Return the rows of a fleet and ratio, and those of the fleet without pruning."""
        return [
            row for row in rows if row["fleet"] == fleet and row["share"] in (share, UNPRUNED_SHARE)
        ]

    def targets(self, fleet: str, share: str) -> dict[str, float]:
        """Return, by seed, the score that all methods reach: the worst of their best scores.

        Only methods that were measured with every seed count. Rows that vary steps or ranks do not
        count.
        """
        best: dict[str, dict[str, list[float]]] = {}
        for row in self.of_group(self.curves, fleet, share):
            if row["model"] in METHODS:
                best.setdefault(row["seed"], {}).setdefault(row["model"], []).append(
                    float(row["score"])
                )
        best = {seed: own for seed, own in best.items() if BANDIT in own}
        everywhere = set(METHODS).intersection(*best.values())
        worst_of = max if self.metric == "loss" else min
        return {
            seed: worst_of(self.better(own[model]) for model in everywhere)
            for seed, own in best.items()
        }

    def seconds_to(self, fleet: str, share: str, model: str) -> dict[str, float]:
        """Return, by seed, the virtual seconds until a model first reaches the target.

        Only rounds with a measurement count.
        """
        found = {}
        for seed, target in self.targets(fleet, share).items():
            own = [
                row
                for row in self.of_group(self.curves, fleet, share)
                if (row["seed"], row["model"]) == (seed, model)
            ]
            if reached := [
                float(row["seconds"]) for row in own if self.reaches(float(row["score"]), target)
            ]:
                found[seed] = min(reached)
        return found


def found_in(files: Files, metric: str) -> Found:
    """Return the measurements in the study's files."""
    devices = files.devices().rows if files.devices_path.exists() else []
    rounds = str(files.rows.conditions["settings"]["federation.rounds"])
    return Found(
        files.rows.rows, [*files.curves.rows, *_ends(files.rows.rows, rounds)], metric, devices
    )


def _ends(rows: Sequence[Row], rounds: str) -> Iterator[Row]:
    """Yield the only point in the curves of models that are cut after the rounds."""
    for row in rows:
        if row["model"].startswith((AT_ONCE_LAST, *cuts.LAST)):
            yield {
                **{name: row[name] for name in (*KEYS, "seconds", "score", "worst")},
                "round": rounds,
            }
