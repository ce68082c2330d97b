"""Studies of the tuning methods; a row is one number: a loss, an accuracy or an error."""

import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.reporting.paired_comparison import Pair
from benchmarks.reporting.rows import Rows
from benchmarks.tuning.federation import Averaging, Federation
from benchmarks.tuning.report import Table
from espalier.data.client_items import as_tests, public_items
from espalier.data.tasks.scored_items import ScoredItems
from espalier.evaluation.scores import majority_share
from espalier.hf.machine.computing import Computing
from espalier.hf.opening.opened_model import OpenedModel
from espalier.models.adapters import Tensors
from espalier.settings.run import RunSettings, parse
from espalier.training.sequences import Sequences

KEYS = ("seed", "setting", "test", "measure")
FIGURES = ("value",)
GLOBAL = "global"
"""Name of the public test items; a client's own items are named by its number."""
RANK = 8
"""Rank in studies in which all clients have the same rank."""
RANKS = (2, 2, 4, 4, 8, 8, 16, 16, 32, 32)
"""Ranks of the ten clients in studies with different ranks."""
ALPHAS = (10.0, 1.0, 0.5, 0.1)
MAJORITY = "majority of the test items"


@dataclass
class Bench:
    """Common data of all rows of a study."""

    model: OpenedModel
    computing: Computing
    common: Mapping[str, Any]
    """Settings of the run that no study varies, flat."""
    seeds: Sequence[int]
    _public: ScoredItems | None = field(default=None, init=False)
    _sequences: Mapping[int, Sequences] | None = field(default=None, init=False)

    def settings(self, seed: int, **varied: Any) -> RunSettings:
        """Return the settings of one federation.

        In ``varied``, underscores stand for hyphens, and double underscores for dots.
        """
        return parse(
            {
                **self.common,
                "seed": seed,
                **{k.replace("__", ".").replace("_", "-"): v for k, v in varied.items()},
            }
        )

    @contextmanager
    def federation(
        self, settings: RunSettings, limits: Sequence[int] | None = None
    ) -> Iterator[Federation]:
        """Yield a federation, with a temporary folder for its server."""
        with tempfile.TemporaryDirectory() as scratch:
            made = Federation(
                settings, self.model, self.computing, Path(scratch), limits, self._sequences
            )
            # Each client has its own file, which does not depend on the seed, so the sequences are
            # reused.
            if "{client}" in settings.data.path:
                self._sequences = made.sequences
            yield made

    @property
    def public(self) -> ScoredItems:
        """Public test items."""
        if self._public is None:
            settings = self.settings(self.seeds[0])
            self._public = as_tests(settings, public_items(settings), self.model)
        return self._public


@dataclass(frozen=True)
class Study:
    """Study: default settings, work, and tables of the report."""

    title: str
    settings: Mapping[str, Any]
    work: Callable[[Bench, Rows], None]
    tables: tuple[Table, ...]


def _is_measured(rows: Rows, seed: int, setting: str, last: str, measure: str) -> bool:
    """Return True if the last row of a setting exists, a measure of the test ``last``."""
    wanted = (str(seed), setting, last, measure)
    return any(
        (row["seed"], row["setting"], row["test"], row["measure"]) == wanted for row in rows.rows
    )


def _put_down(
    rows: Rows, seed: int, setting: str, values: Sequence[tuple[str, str, float]]
) -> None:
    """Record the rows of a setting, (test, measure, value) each, except existing ones."""
    for test, measure, value in values:
        for cell in rows.missing(
            iter([{"seed": seed, "setting": setting, "test": test, "measure": measure}])
        ):
            rows.add(cell, value=value)


# ----- Dolly's clients ----------------------------------------------------------------------------


def dolly(bench: Bench, rows: Rows) -> None:
    """Measure the loss of four models on every client's held-out items and on the public ones.

    For the local baseline, each client has its own model.
    """
    for seed in bench.seeds:
        settings = bench.settings(seed)
        with bench.federation(settings) as clients:
            wanted: dict[str, Callable[[], Tensors | None]] = {
                "dense": lambda: None,
                "federated": lambda: clients.federated(Averaging("factors")).tensors,
                "centralized": clients.centralized,
            }
            for setting, make in wanted.items():
                if not _is_measured(rows, seed, setting, GLOBAL, "loss"):
                    made = make()
                    tests = {str(k): own for k, own in clients.own_tests.items()} | {
                        GLOBAL: bench.public
                    }
                    values = [
                        (test, "loss", clients.score(made, items)["loss"])
                        for test, items in tests.items()
                    ]
                    _put_down(rows, seed, setting, values)
            if not _is_measured(rows, seed, "local-baseline", GLOBAL, "loss"):
                models = {client: clients.alone(client) for client in clients.sequences}
                values = [
                    (str(k), "loss", clients.score(models[k], items)["loss"])
                    for k, items in clients.own_tests.items()
                ]
                everywhere = fmean(
                    clients.score(model, bench.public)["loss"] for model in models.values()
                )
                _put_down(rows, seed, "local-baseline", [*values, (GLOBAL, "loss", everywhere)])


# ----- ranks --------------------------------------------------------------------------------------


def ranks(bench: Bench, rows: Rows) -> None:
    """Compare zero-padding and SVD with different ranks, and both averages with equal ranks."""
    number = int(bench.common["num-clients"])
    mixed = [RANKS[client * len(RANKS) // number] for client in range(number)]
    last = f"round {bench.settings(bench.seeds[0]).federation.rounds}"
    for seed in bench.seeds:
        for limits, rank, names in (
            (mixed, max(mixed), {"ranks 2 to 32, zero-pad": Averaging("factors", "norms"),
                                 "ranks 2 to 32, svd": Averaging("updates", "norms")}),
            (None, RANK, {f"rank {RANK}, factors": Averaging("factors"),
                          f"rank {RANK}, svd": Averaging("updates")}),
        ):  # fmt: skip
            missing = {
                name: how
                for name, how in names.items()
                if not _is_measured(rows, seed, name, last, "error at clients")
            }
            if not missing:
                continue
            settings = bench.settings(seed, lora__rank=rank, lora__alpha=2.0 * rank)
            with bench.federation(settings, limits) as clients:
                for name, averaging in missing.items():
                    _put_down(rows, seed, name, _losses_and_errors(bench, clients, averaging))


def _losses_and_errors(
    bench: Bench, clients: Federation, averaging: Averaging
) -> list[tuple[str, str, float]]:
    found = clients.federated(averaging)
    tests = clients.own_tests
    own = fmean(clients.score(found.tensors, items)["loss"] for items in tests.values())
    limits = {client: clients.limits[client] for client in tests}
    values = [
        ("own", "loss", own),
        (GLOBAL, "loss", clients.score(found.tensors, bench.public)["loss"]),
    ]
    if len(set(limits.values())) > 1:
        own = fmean(
            clients.score(found.tensors, items, limits[client])["loss"]
            for client, items in tests.items()
        )
    values.insert(1, ("own, at the client's rank", "loss", own))
    for number, (whole, cut) in enumerate(
        zip(found.errors, found.errors_at_clients, strict=True), start=1
    ):
        values += [
            (f"round {number}", "error", whole),
            (f"round {number}", "error at clients", cut),
        ]
    return values


# ----- encoder on SST-2 ---------------------------------------------------------------------------


def encoder(bench: Bench, rows: Rows) -> None:
    """Measure the accuracy of three models on the public items, by unevenness of the classes.

    The centralized model is trained on the items of all clients in any distribution, so it is
    trained once per seed.
    """
    settings = bench.settings(bench.seeds[0])
    majority = majority_share(public_items(settings))
    for seed in bench.seeds:
        pooled: float | None = None
        for alpha in ALPHAS:
            setting = f"{alpha:g}"
            if _is_measured(rows, seed, setting, MAJORITY, "accuracy"):
                continue
            with bench.federation(bench.settings(seed, data__alpha=alpha)) as clients:

                def accuracy(tensors: Tensors) -> float:
                    return clients.score(tensors, bench.public)["acc"]

                if pooled is None:
                    known = [
                        row["value"]
                        for row in rows.rows
                        if row["seed"] == str(seed) and row["test"] == "centralized"
                    ]
                    pooled = float(known[0]) if known else accuracy(clients.centralized())
                values = {
                    "federated": accuracy(clients.federated(Averaging("factors")).tensors),
                    "local-baseline": fmean(
                        accuracy(clients.alone(client)) for client in clients.sequences
                    ),
                    "centralized": pooled,
                    MAJORITY: majority,
                }
            _put_down(
                rows, seed, setting, [(name, "accuracy", value) for name, value in values.items()]
            )


# ----- study data ---------------------------------------------------------------------------------


def first_records(clients: Sequence[Path], number: int, scratch: Path) -> str:
    """Write the first records of each client's file, and return the path pattern with ``{client}``.

    0 takes all records.
    """
    for client, file in enumerate(clients):
        if number:
            with open(file, encoding="utf-8", newline="\n") as lines:
                head = [line for _, line in zip(range(number), lines, strict=False)]
            (scratch / f"{client}.jsonl").write_text("".join(head), encoding="utf-8")
        else:
            shutil.copy(file, scratch / f"{client}.jsonl")
    return str(scratch / "{client}.jsonl")


LANGUAGE_MODEL: dict[str, Any] = {
    "task.name": "dolly",
    "task.max-tokens": 96,
    "task.max-test-tokens": 96,
    "task.max-test-items": 16,
    "federation.rounds": 3,
    "training.steps": 5,
    "training.batch-size": 4,
    "training.learning-rate": 2e-3,
    "lora.rank": RANK,
    "lora.alpha": 2.0 * RANK,
    "lora.targets": "all",
}
CLASSIFIER: dict[str, Any] = {
    "task.name": "sst2",
    "task.max-tokens": 64,
    "task.max-test-tokens": 64,
    "task.max-test-items": 0,
    "data.partition": "dirichlet",
    "federation.rounds": 5,
    "training.steps": 10,
    "training.batch-size": 8,
    "training.learning-rate": 3e-3,
    "lora.rank": RANK,
    "lora.alpha": 2.0 * RANK,
    "lora.targets": "all",
}
AGAINST_OTHERS = tuple(
    Pair("federated", other) for other in ("dense", "local-baseline", "centralized")
)
AVERAGES = (
    Pair("ranks 2 to 32, svd", "ranks 2 to 32, zero-pad"),
    Pair("rank 8, svd", "rank 8, factors"),
)
CHANCE = Pair("federated", MAJORITY)
STUDIES = {
    "dolly": Study(
        "Federated LoRA at Dolly's ten clients", LANGUAGE_MODEL, dolly,
        (Table("loss", "setting", "test", "loss in nats per token of the answer", joined=False,
               pairs=AGAINST_OTHERS, axis="items of client, or public items (global)",
               minus="local-baseline", hidden="dense"),),
    ),
    "ranks": Study(
        "Averaging adapters of different ranks", LANGUAGE_MODEL, ranks,
        (
            Table("loss", "setting", "test", "loss in nats per token of the answer", joined=False,
                  pairs=AVERAGES),
            Table("error", "setting", "test", "distance from the exact mean, relative"),
            Table("error at clients", "setting", "test", "the same, cut to the clients' ranks"),
        ),
    ),
    "encoder": Study(
        "SST-2 with an encoder, by the evenness of the clients' classes", CLASSIFIER, encoder,
        (Table("accuracy", "test", "setting", "fraction of the test items that are right",
               pairs=(*AGAINST_OTHERS, CHANCE),
               axis="alpha of the Dirichlet distribution (smaller: less even)"),),
    ),
}  # fmt: skip
