"""Command line of the task study: its arguments, and the conditions of its rows."""

import argparse
from pathlib import Path
from typing import Any

from benchmarks import study_command
from benchmarks.fedspine.tasks import runs
from benchmarks.fedspine.tasks.report import write_report
from benchmarks.fedspine.tasks.results import found_in
from benchmarks.reporting.rows import Rows
from benchmarks.smaller.bench import Bench
from espalier.data.client_items import public_items
from espalier.errors import InputError
from espalier.hf.opening.opened_model import open_model
from espalier.settings.run import parse
from espalier.storage.blobs import sha256
from strategies.fleet import FLEETS

TITLE = "FedSpine on {}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command-line arguments of the study."""
    names = "model seeds threads work out"
    study_command.add_arguments(parser, names, seeds=[0], work=Path("runs/fedspine-tasks"))
    parser.add_argument(
        "--task", required=True, help="task.name of the settings, for instance sst2 or dolly"
    )
    parser.add_argument(
        "--name", help="of the study's files, fedspine-<name>; the task's, if none is given"
    )
    parser.add_argument(
        "--train", type=Path, help="records that are dealt out to the devices by class"
    )
    parser.add_argument(
        "--alpha", type=float, default=0.5, help="how evenly --train is dealt out: data.alpha"
    )
    parser.add_argument(
        "--clients", type=Path, help="directory of the devices' records, client_<number>.jsonl"
    )
    parser.add_argument("--test", type=Path, required=True, help="records of the test items")
    parser.add_argument("--parts", nargs="+", choices=runs.PARTS, default=["methods"])
    parser.add_argument("--shares", type=float, nargs="+", default=list(runs.SHARES))
    parser.add_argument(
        "--calibration", type=Path, help="public text for what LLM-Pruner cuts (--parts cuts)"
    )
    parser.add_argument(
        "--only",
        nargs="+",
        help="of the parts' rows those of these models, for instance bandits schedule",
    )
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=10, help="of a round")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--max-tokens", type=int, default=64, help="of a sequence or test item")
    parser.add_argument("--max-test-items", type=int, default=0, help="0: all")
    parser.add_argument("--every", type=int, default=4, help="rounds between two measurements")


def work(given: argparse.Namespace) -> None:
    """Measure missing rows of the study, and write its report.

    Raises
    ------
    InputError
        A setting or file is wrong, or existing rows were measured under other conditions.
    """
    trained = {
        "federation.rounds": given.rounds, "training.steps": given.steps,
        "training.batch-size": given.batch_size, "training.learning-rate": given.learning_rate,
        "lora.targets": "all", "lora.rank": 8, "lora.alpha": 16.0, "task.name": given.task,
        "task.max-tokens": given.max_tokens, "task.max-test-tokens": given.max_tokens,
        "task.max-test-items": given.max_test_items, "evaluation.every": given.every,
        **_data(given),
    }  # fmt: skip
    common = {
        **trained, "model": given.model, "threads": given.threads, "data.path": _path(given),
        "task.test-path": str(given.test), "evaluation.local-baseline": False,
        "evaluation.centralized": "off", "num-clients": runs.DEVICES,
    }  # fmt: skip
    parsed = parse({**common, "method": "fedpetuning"})
    model = open_model(parsed.model)
    items = public_items(parsed)
    metric = "loss" if max(len(item.options) for item in items) < 2 else "acc"
    calibrated = given.calibration is not None and given.calibration.is_file()
    conditions: dict[str, Any] = {
        "model": study_command.model_conditions(model, "parameters"),
        "settings": trained,
        "records": {file.name: sha256(file.read_bytes()) for file in (*_files(given), given.test)},
        "fleets": {file.name: sha256(file.read_bytes()) for file in sorted(FLEETS.glob("*.toml"))},
        **(
            {"texts": {given.calibration.name: sha256(given.calibration.read_bytes())}}
            if calibrated
            else {}
        ),
        "items": len(items),
        "metric": metric,
        "threads": given.threads,
    }
    name = given.name or given.task
    path = given.out / f"fedspine-{name}"
    if given.rounds % given.every:
        raise InputError(
            f"tasks: --rounds {given.rounds} --every {given.every}: the last round would not be"
            " measured; give a divisor"
        )
    files = files_of(path, conditions)
    bench = Bench(common, given.model, [], given.seeds, given.work.absolute())
    wanted = [
        cell
        for cell in runs.cells(given.parts, given.shares, common)
        if not given.only or cell.model in given.only
    ]
    # Only encoders have a head to train.
    wanted = [cell for cell in wanted if cell.whole != "head" or model.family.kind == "encoder"]
    # An encoder that is cut before tuning has not learned the classes yet.
    if model.family.kind == "encoder":
        wanted = [cell for cell in wanted if cell.cut != "first"]
    elif any(cell.cut for cell in wanted) and not calibrated:
        raise InputError(
            "tasks: --parts cuts needs --calibration FILE, public text for LLM-Pruner; name one"
        )
    runs.measure(bench, files, wanted, metric, given.calibration)
    write_report(TITLE.format(name), found_in(files, metric), files.rows.conditions, path)


def files_of(path: Path, conditions: dict[str, Any]) -> runs.Files:
    """Return the study's files; missing ones are created.

    Raises
    ------
    InputError
        Existing rows were measured under other conditions.
    """
    return runs.Files(
        Rows(path.with_suffix(".csv"), runs.KEYS, runs.FIGURES, conditions),
        Rows(
            path.with_name(f"{path.name}-curves.csv"),
            runs.CURVE_KEYS,
            runs.CURVE_FIGURES,
            conditions,
        ),
    )


def _data(given: argparse.Namespace) -> dict[str, Any]:
    dealt = {"data.partition": "dirichlet", "data.alpha": given.alpha} if given.train else {}
    return {"data.source": "files", **dealt}


def _files(given: argparse.Namespace) -> list[Path]:
    """Return the records that devices train on.

    Raises
    ------
    InputError
        They do not exist.
    """
    files = (
        [given.train]
        if given.train
        else (
            [given.clients / f"client_{n}.jsonl" for n in range(runs.DEVICES)]
            if given.clients
            else []
        )
    )
    if not files or (given.train and given.clients):
        raise InputError(
            "tasks: needs --train FILE, or --clients DIRECTORY with client_0.jsonl and so on"
        )
    files = (
        [given.train]
        if given.train
        else [given.clients / f"client_{device}.jsonl" for device in range(runs.DEVICES)]
    )
    if missing := [str(file) for file in (*files, given.test) if not file.is_file()]:
        raise InputError(f"tasks: {', '.join(missing)}: is no file; name the records of the task")
    return files


def _path(given: argparse.Namespace) -> str:
    files = _files(given)
    return str(files[0] if given.train else given.clients / "client_{client}.jsonl")
