"""Times to a common score by fleet, and scores and times by alpha; seed 0."""

from collections.abc import Mapping, Sequence

from benchmarks.reporting.rows import Row

Values = Mapping[str, Mapping[str, float]]
"""Values by fleet or alpha, and model."""


def by_fleet(rows: Sequence[Row], curves: Sequence[Row], share: str, of_loss: bool) -> Values:
    """Return the seconds in each fleet until a model reaches the common score; seed 0.

    The common score is one that all models reach in all fleets. Only models that were measured with
    every fleet count. Rounds without a measurement are ignored.
    """
    counted = [row for row in curves if row["seed"] == "0" and row["share"] in (share, "0.0")]
    measured = {row["fleet"] for row in rows if row["model"] == "bandits" and row["share"] == share}
    fleets = [fleet for fleet in ("low", "medium", "high") if fleet in measured]
    own = {fleet: {row["model"] for row in counted if row["fleet"] == fleet} for fleet in fleets}
    models = [
        model
        for model in dict.fromkeys(row["model"] for row in counted)
        if all(model in own[at] for at in fleets)
    ]
    if len(fleets) < 2 or not models:
        return {}
    best, worst = (min, max) if of_loss else (max, min)
    points = {
        (fleet, model): _points(counted, fleet, model) for fleet in fleets for model in models
    }
    target = worst(best(score for _, score in found) for found in points.values())
    return {
        fleet: {
            model: min(
                at
                for at, score in points[fleet, model]
                if (score <= target if of_loss else score >= target)
            )
            for model in models
        }
        for fleet in fleets
    }


def _points(rows: Sequence[Row], fleet: str, model: str) -> list[tuple[float, float]]:
    own = [row for row in rows if (row["fleet"], row["model"]) == (fleet, model)]
    return [(float(row["seconds"]), float(row["score"])) for row in own]


def by_alpha(rows: Sequence[Row], fleet: str, share: str, alpha: float) -> Values:
    """Return the scores of models with several values of alpha, most even first; seed 0."""
    found = {
        own: {row["model"]: float(row["score"]) for row in one}
        for own, one in _of_alphas(rows, fleet, share, alpha)
    }
    return {f"alpha {own:g}": scores for own, scores in found.items()}


def times_by_alpha(
    curves: Sequence[Row], fleet: str, share: str, alpha: float, of_loss: bool
) -> Values:
    """Return the seconds until models reach the score common to their alpha (figure 6); seed 0.

    Each alpha has its own target, because more uneven data lead to lower scores. Rounds without a
    measurement are ignored.
    """
    values: dict[str, dict[str, float]] = {}
    best, worst = (min, max) if of_loss else (max, min)
    for own, found in _of_alphas(curves, fleet, share, alpha):
        points: dict[str, list[tuple[float, float]]] = {}
        for row in found:
            points.setdefault(row["model"], []).append((float(row["seconds"]), float(row["score"])))
        target = worst(best(score for _, score in of_model) for of_model in points.values())
        values[f"alpha {own:g}\n(to {target:.3g})"] = {
            model: min(
                at for at, score in of_model if (score <= target if of_loss else score >= target)
            )
            for model, of_model in points.items()
        }
    return values


def _of_alphas(
    rows: Sequence[Row], fleet: str, share: str, alpha: float
) -> list[tuple[float, list[Row]]]:
    """Return rows by alpha, the largest first, of models that were measured with several alphas.

    The model names in these rows do not contain the alpha.
    """
    counted = [
        row
        for row in rows
        if row["seed"] == "0" and row["fleet"] == fleet and row["share"] in (share, "0.0")
    ]
    found: dict[float, list[Row]] = {}
    for row in counted:
        model, marked, own = row["model"].partition(", alpha ")
        if marked:
            found.setdefault(float(own), []).append({**row, "model": model})
    models = {row["model"] for own in found.values() for row in own}
    if models:
        found[alpha] = [row for row in counted if row["model"] in models]
    return sorted(found.items(), reverse=True)
