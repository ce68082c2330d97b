"""Measurements of each study; a row is a run, the dense model, or chance."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.fedsoda import cells
from benchmarks.fedsoda.cells import FEDBIOT, FEDOT, FEDPETUNING, FEDSODA, Cell
from benchmarks.fedsoda.runs import Bench
from benchmarks.reporting.paired_comparison import Pair
from benchmarks.reporting.rows import Rows

DENSE = "dense"
CHANCE = "chance"
KEYS = ("seed", "arm", "place")
SCORES = ("loss", "acc", "acc_norm")
PERPLEXITIES = ("perplexity", "sub_model_perplexity")
COSTS = ("megabytes_up", "megabytes_down", "megabytes_stored", "thousand_trained", "cpu_seconds")
BY_ROUND = "loss"
MEGA = 1e6


@dataclass(frozen=True)
class Study:
    """Study: its cells, and its paired comparisons."""

    title: str
    cells: Callable[[], Iterator[Cell]]
    pairs: tuple[Pair, ...] = ()
    by_round: bool = False
    """True if a row is a round."""

    @property
    def keys(self) -> tuple[str, ...]:
        """Columns that identify a row."""
        return ("seed", "arm", "round") if self.by_round else KEYS

    @property
    def figures(self) -> tuple[str, ...]:
        """Columns with measured values."""
        return (BY_ROUND,) if self.by_round else (*SCORES, *PERPLEXITIES, *COSTS)


def work(study: Study, bench: Bench, seeds: Sequence[int], rows: Rows) -> None:
    """Measure missing rows of a study."""
    if study.by_round:
        _rounds(study, bench, seeds, rows)
        return
    for place in dict.fromkeys(cell.place for cell in study.cells()):
        for seed in seeds:
            runs = [cell for cell in study.cells() if cell.place == place]
            for arm in (CHANCE, DENSE, *(cell.arm for cell in runs)):
                key = {"seed": seed, "arm": arm, "place": place}
                if not rows.missing(iter([key])):
                    continue
                if arm == CHANCE:
                    rows.add(key, **_figures(bench.chance))
                # Every run measures the perplexity of the dense model.
                elif arm == DENSE:
                    rows.add(
                        key,
                        **_figures(
                            {
                                **bench.dense,
                                "perplexity": bench.result(runs[0], seed)["dense_perplexity"],
                            }
                        ),
                    )
                else:
                    (cell,) = (cell for cell in runs if cell.arm == arm)
                    rows.add(key, **_of_run(bench.result(cell, seed)))


def _rounds(study: Study, bench: Bench, seeds: Sequence[int], rows: Rows) -> None:
    for seed in seeds:
        for cell in study.cells():
            number = bench.settings(cell, seed)["federation.rounds"]
            missing = rows.missing(
                {"seed": seed, "arm": cell.arm, "round": place} for place in range(number + 1)
            )
            for key in missing:
                losses = [bench.dense["loss"], *bench.result(cell, seed)["losses"]]
                rows.add(key, loss=losses[key["round"]])


def _figures(given: dict[str, Any]) -> dict[str, float | None]:
    return {name: given.get(name) for name in (*SCORES, *PERPLEXITIES, *COSTS)}


def _of_run(result: dict[str, Any]) -> dict[str, float | None]:
    costs = {f"megabytes_{way}": result[f"bytes_{way}"] / MEGA for way in ("up", "down", "stored")}
    trained = {"thousand_trained": result["trained"] / 1000, "cpu_seconds": result["cpu_seconds"]}
    return _figures({**result, **result["scores"], **costs, **trained})


STUDIES = {
    "methods": Study(
        "Four methods over four distributions of the data", cells.methods,
        (*(Pair(FEDSODA, other) for other in (FEDPETUNING, FEDOT, FEDBIOT, DENSE)),
         Pair(FEDOT, FEDPETUNING)),
    ),
    "ablation": Study(
        "Alignment before the first round and after", cells.ablation,
        (*(Pair(one, "none") for one in ("pre", "realign", "both")), Pair("both", "pre"),
         Pair("both", "realign")),
    ),
    "combinations": Study(
        "Layers of a group, groups, and the interval of alignment", cells.combinations,
        (Pair("(n, p) = (2, 1)", "(n, p) = (1, 2)"), Pair("r = 2", "r = 5"),
         Pair("r = 10", "r = 5")),
    ),
    "public": Study(
        "Which text the server aligns on", cells.public,
        (Pair(cells.IN_DOMAIN, cells.OUT_OF_DOMAIN),),
    ),
    "rounds": Study("Loss after every round", cells.rounds, by_round=True),
}  # fmt: skip
