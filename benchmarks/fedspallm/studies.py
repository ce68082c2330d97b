"""Studies of FedSpaLLM; each adds rows of perplexity per text."""

import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from benchmarks.fedspallm import app
from benchmarks.fedspallm.clients import Clients
from benchmarks.reporting.paired_comparison import Pair
from benchmarks.reporting.perplexity_report import Study
from benchmarks.reporting.rows import Rows
from espalier.data.passages import passages
from espalier.evaluation.perplexity import mean_losses, perplexity
from espalier.hf.stream.block_stream import BlockStream
from espalier.hf.stream.edits import Edits, dense
from espalier.results.style import METHODS
from espalier.settings.run import parse

Cell = dict[str, Any]

FEDERATIONS = (4, 8, 16)
SPARSITIES = (0.5, 0.6, 0.7, 0.8)
SAMPLES = 32
"""Number of calibration samples of each client in the paper's tables 1 to 3.

``FEDERATIONS`` and ``SPARSITIES`` are those of the same tables.
"""
CLIENTS = 8
"""Number of clients in studies that the paper does not have."""
SHARES = (0.25, 0.5, 0.75, 1.0)
PLANS = ((1, "constant"), (2, "constant"), (2, "linear"), (2, "cubic"), (4, "linear"))
"""Number of rounds and schedule of the sparsity."""
FOLDS: dict[str, dict[str, Any]] = {
    "FedSpaLLM": {},
    "l0 mean, no expansion": {"fedspallm.mask-expansion": False},
    "FedAvg, expansion": {"fedspallm.aggregation": "mean"},
    "FedAvg, no expansion": {"fedspallm.aggregation": "mean", "fedspallm.mask-expansion": False},
}


@dataclass
class Bench:
    """Common data of all cells."""

    stream: BlockStream
    texts: Mapping[str, Tensor]
    common: Mapping[str, Any]
    """Settings of the run that no study varies, flat."""
    private: Sequence[Path]
    """Files of the clients' text: one file, or one per domain."""
    seeds: Sequence[int]

    def perplexities(self, models: Iterable[Edits], texts: Iterable[str]) -> dict[str, float]:
        """Return the mean perplexity of several models, per text."""
        samples = {text: self.texts[text] for text in texts}
        found: dict[str, list[float]] = {text: [] for text in samples}
        for edits in models:
            for text, loss in mean_losses(self.stream, samples, edits).items():
                found[text].append(perplexity(loss))
        return {text: float(np.mean(values)) for text, values in found.items()}


def tables(bench: Bench, rows: Rows) -> None:
    """Measure tables 1 to 3, and baselines that the paper lacks.

    The federations of 4 and 8 clients are the first ones of the 16.
    """
    for seed, sparsity in product(bench.seeds, SPARSITIES):
        most = max(FEDERATIONS)
        flat = {
            **bench.common,
            "seed": seed,
            "pruning.sparsity": sparsity,
            "num-clients": most,
            "data.num-samples": SAMPLES,
        }
        wanted = [
            {"seed": seed, "sparsity": sparsity, "clients": n, "model": fold}
            for n, fold in product(FEDERATIONS, FOLDS)
        ]
        names = ("standalone", "centralized")
        wanted += [
            {"seed": seed, "sparsity": sparsity, "clients": n, "model": name}
            for n, name in product(FEDERATIONS, names)
        ]
        wanted += [{"seed": seed, "sparsity": 0.0, "clients": 0, "model": "dense"}]
        with tempfile.TemporaryDirectory() as scratch:
            clients = Clients(parse(flat), bench.stream, Path(scratch))
            alone = cache(
                lambda client, texts, clients=clients: bench.perplexities(
                    [clients.standalone(client)], texts
                )
            )
            for cell, texts in _missing(bench, rows, wanted):
                everybody = range(cell["clients"])
                if cell["model"] == "standalone":
                    found = [alone(client, texts) for client in everybody]
                    _write(
                        rows,
                        cell,
                        {t: float(np.mean([one[t] for one in found])) for t in texts},
                        sparsity_reached=sparsity,
                    )
                elif cell["model"] == "dense":
                    _add(bench, rows, cell, texts, [dense], sparsity_reached=0.0)
                elif cell["model"] == "centralized":
                    _add(
                        bench,
                        rows,
                        cell,
                        texts,
                        [clients.centralized(everybody)],
                        sparsity_reached=sparsity,
                    )
                else:
                    result = clients.fold(everybody, parse({**flat, **FOLDS[cell["model"]]}))
                    reached = 1 - sum(map(sum, result.num_kept)) / clients.plan.num_weights
                    _add(bench, rows, cell, texts, [result.edits], sparsity_reached=reached)


def domains(bench: Bench, rows: Rows) -> None:
    """Measure clients with one domain each, two per domain, on the texts of all domains."""
    number = 2 * len(bench.private)
    for seed, sparsity in product(bench.seeds, (0.5, 0.7)):
        with tempfile.TemporaryDirectory() as scratch:
            path = _dealt(bench.private, number, Path(scratch))
            varied = {
                "seed": seed,
                "pruning.sparsity": sparsity,
                "num-clients": number,
                "data.num-samples": SAMPLES,
            }
            settings = parse({**bench.common, **varied, "data.path": path})
            clients = Clients(settings, bench.stream, Path(scratch) / "layers")
            owners = {
                file.stem: [
                    client for client in range(number) if client % len(bench.private) == place
                ]
                for place, file in enumerate(bench.private)
            }
            names = [
                "dense",
                *(f"standalone, {name}" for name in owners),
                "FedSpaLLM",
                "FedAvg, expansion",
                "centralized",
            ]
            wanted = [{"seed": seed, "sparsity": sparsity, "model": name} for name in names]
            for cell, texts in _missing(bench, rows, wanted):
                name = cell["model"]
                models = list[Edits]()
                if name in FOLDS:
                    varied_fold = parse({**bench.common, **varied, **FOLDS[name]})
                    models = [clients.fold(range(number), varied_fold).edits]
                elif name == "centralized":
                    models = [clients.centralized(range(number))]
                elif name == "dense":
                    models = [dense]
                else:
                    models = [
                        clients.standalone(client)
                        for client in owners[name.removeprefix("standalone, ")]
                    ]
                _add(bench, rows, cell, texts, models)


def sampling(bench: Bench, rows: Rows) -> None:
    """Measure perplexity, bytes and work with 25 to 100% of the layers sampled.

    All clients have the same capability.
    """
    for seed, sparsity, share in product(bench.seeds, (0.5, 0.7), SHARES):
        cells = [{"seed": seed, "sparsity": sparsity, "layers": f"{share:.0%}"}]
        for cell, _ in _missing(bench, rows, cells):
            _add_run(bench, rows, cell, {"fedspallm.sampled-layers": share})


def rounds(bench: Bench, rows: Rows) -> None:
    """Measure several rounds with constant or increasing sparsity and all layers."""
    for seed, sparsity, (number, schedule) in product(bench.seeds, (0.7,), PLANS):
        cells = [
            {
                "seed": seed,
                "sparsity": sparsity,
                "plan": f"{number} rounds, {schedule}" if number > 1 else "1 round",
            }
        ]
        for cell, _ in _missing(bench, rows, cells):
            _add_run(
                bench, rows, cell, {"federation.rounds": number, "fedspallm.schedule": schedule}
            )


def _missing(
    bench: Bench, rows: Rows, cells: Sequence[Cell]
) -> Iterator[tuple[Cell, tuple[str, ...]]]:
    """Yield cells with the texts on which they were not measured yet."""
    for cell in cells:
        missing = rows.missing({**cell, "text": text} for text in bench.texts)
        if missing:
            yield cell, tuple(found["text"] for found in missing)


def _add(
    bench: Bench,
    rows: Rows,
    cell: Cell,
    texts: Iterable[str],
    models: Iterable[Edits],
    **figures: float,
) -> None:
    _write(rows, cell, bench.perplexities(models, texts), **figures)


def _write(rows: Rows, cell: Cell, perplexities: Mapping[str, float], **figures: float) -> None:
    for text, value in perplexities.items():
        rows.add({**cell, "text": text}, perplexity=value, **figures)


def _add_run(bench: Bench, rows: Rows, cell: Cell, varied: Mapping[str, Any]) -> None:
    flat = {
        **bench.common, **varied, "num-clients": CLIENTS, "data.num-samples": SAMPLES,
        "seed": cell["seed"], "pruning.sparsity": cell["sparsity"],
        "evaluation.local-baseline": False, "evaluation.centralized": "off",
    }  # fmt: skip
    known = {text for text in bench.texts if not rows.missing(iter([{**cell, "text": text}]))}
    summary = app.run(flat)
    traffic = {name: summary[name] / CLIENTS / 1e6 for name in ("bytes_up", "bytes_down")}
    work = float(np.mean([client["seconds"] for client in summary["clients"]]))
    for metric in summary["metrics"]:
        figures = {
            "megabytes_up": traffic["bytes_up"],
            "megabytes_down": traffic["bytes_down"],
            "work_seconds": work,
        }
        if metric["dataset"] not in known:
            rows.add(
                {**cell, "text": metric["dataset"]},
                perplexity=metric["values"]["federated"],
                **figures,
            )


def _dealt(files: Sequence[Path], number: int, scratch: Path) -> str:
    """Write a text per client, and return the path pattern.

    Domains alternate over the clients, and the passages of a domain are distributed in turn.
    """
    owners = number // len(files)
    for client in range(number):
        found = list(passages(files[client % len(files)].read_text()))
        (scratch / f"{client}.txt").write_text("\n\n".join(found[client // len(files) :: owners]))
    return str(scratch / "{client}.txt")


OTHERS = ("standalone", "centralized", "FedAvg, expansion", "l0 mean, no expansion")
TABLE_PAIRS = tuple(
    Pair(f"FedSpaLLM, {n} clients", f"{other}, {n} clients")
    for other in OTHERS
    for n in FEDERATIONS
)
SIZES = tuple(Pair("FedSpaLLM, 4 clients", f"FedSpaLLM, {n} clients") for n in FEDERATIONS[1:])
DOMAINS = (
    "standalone, wiki",
    "standalone, c4",
    "standalone, stories",
    "FedAvg, expansion",
    "centralized",
)
LOOK = METHODS["fedspallm"]
RUN_FIGURES = ("perplexity", "megabytes_up", "megabytes_down", "work_seconds")
STUDIES = {
    "tables": Study(
        "FedSpaLLM with 4, 8 and 16 clients (the paper's tables 1 to 3)",
        ("seed", "sparsity", "clients", "model", "text"), ("perplexity", "sparsity_reached"),
        tables, (*TABLE_PAIRS, *SIZES), LOOK,
        {f", {number} clients": f"{number} clients" for number in FEDERATIONS}, ("0.7", "0.8"),
    ),
    "domains": Study(
        "Clients of one domain each", ("seed", "sparsity", "model", "text"), ("perplexity",),
        domains, tuple(Pair("FedSpaLLM", other) for other in DOMAINS), LOOK,
    ),
    "sampling": Study(
        "Fraction of the layers that are sampled", ("seed", "sparsity", "layers", "text"),
        RUN_FIGURES, sampling, tuple(Pair(f"{share:.0%}", "100%") for share in SHARES[:-1]), LOOK,
    ),
    "rounds": Study(
        "Rounds and sparsity schedules", ("seed", "sparsity", "plan", "text"), RUN_FIGURES, rounds,
        tuple(Pair(f"{number} rounds, {schedule}", "1 round") for number, schedule in PLANS[1:]),
        LOOK,
    ),
}  # fmt: skip
