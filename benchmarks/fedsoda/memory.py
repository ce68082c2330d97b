"""Peak memory of a client during training, by method, each in a new process."""

import argparse
import gc
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.fedsoda.cells import COMMON, IID, METHODS, Cell
from benchmarks.memory.larger_than_memory import peak
from benchmarks.reporting.rows import Rows
from benchmarks.study_command import chosen
from espalier.errors import InputError
from espalier.hf.group_scores.similar_groups import evenly_dropped
from espalier.hf.machine.computing import set_up
from espalier.hf.nf4.matrices import bitsandbytes
from espalier.hf.opening.opened_model import open_model
from espalier.methods.tuning.adapters.tensors import trained
from espalier.methods.tuning.fedsoda import FedSodaSettings
from espalier.settings.node import simulated_node
from espalier.settings.run import RunSettings, parse
from espalier.training.adapter_training import AdapterTraining
from espalier.training.initial_values import initial_adapters
from espalier.training.sequences import client_sequences
from strategies.tuning.fedsoda.sub_model import write_sub_model

KEYS = ("method",)
FIGURES = ("interpreter_mib", "peak_mib", "client_mib")
MIB = 1 << 20
STEPS = 4


def measure(given: argparse.Namespace) -> None:
    """Measure every method, and write ``fedsoda-memory.csv`` and a Markdown table."""
    changes = chosen(given.set)
    common = {
        **changes, "model": given.model, "threads": given.threads, "device": given.device,
        "task.name": given.task, "data.source": "files", "data.path": str(given.data),
        "training.steps": STEPS, "federation.rounds": 1,
    }  # fmt: skip
    model = open_model(given.model)
    conditions = {
        "model": {"name": model.directory.name, "sha256": model.sha256},
        "settings": {**COMMON, **changes}, "steps": STEPS, "threads": given.threads,
        "device": given.device,
    }  # fmt: skip
    path = given.out / "fedsoda-memory"
    rows = Rows(path.with_suffix(".csv"), KEYS, FIGURES, conditions)
    for cell in rows.missing({"method": name} for name in METHODS):
        rows.add(
            cell,
            **in_a_fresh_process(
                Cell(cell["method"], IID, METHODS[cell["method"]]).settings(common)
            ),
        )
    write_table(rows, path)


def write_table(rows: Rows, path: Path) -> None:
    """Write ``<path>.md``."""
    conditions = rows.conditions
    batch = conditions["settings"]["training.batch-size"]
    lines = [
        "# Peak memory of a client",
        "",
        (
            f"Model `{conditions['model']['name']}`, {conditions['steps']} steps of {batch}"
            f" sequences. [Figures](./{path.name}.csv), [conditions](./{path.name}.json)."
        ),
        "",
        "| | before loading the model, MiB | peak, MiB | difference, MiB |",
        "|---|---:|---:|---:|",
    ]
    lines += [
        f"| {row['method']} | {' | '.join(f'{float(row[name]):.1f}' for name in FIGURES)} |"
        for row in rows.rows
    ]
    path.with_suffix(".md").write_text("\n".join([*lines, ""]))


def in_a_fresh_process(settings: Mapping[str, Any]) -> dict[str, float]:
    """Return the figures of a new process.

    Raises
    ------
    InputError
        The process failed.
    """
    with tempfile.TemporaryDirectory() as scratch:
        checked = parse(settings)
        given = {**settings, "held": _write_held(checked, Path(scratch)), "cache": scratch}
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.fedsoda.memory", json.dumps(given)],
            stdout=subprocess.PIPE,
            text=True,
        )
    if done.returncode:
        raise InputError(
            f"memory: the process of {settings['method']} ended with {done.returncode}; see above"
        )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def _write_held(settings: RunSettings, scratch: Path) -> str:
    """Write the model that clients hold, and return its path.

    For a sub-model, evenly spaced blocks are dropped; which ones makes no difference for memory.
    """
    if not isinstance(settings.job, FedSodaSettings):
        return settings.model
    model = open_model(settings.model)
    target = scratch / "sub-model"
    gone = evenly_dropped(
        settings.job.emulator_of(len(model.plan.blocks)), settings.job.num_dropped, "down"
    )
    write_sub_model(
        model,
        [block.index for block in model.plan.blocks if block.index not in gone],
        target,
        settings,
    )
    return str(target)


def train(given: dict[str, Any]) -> dict[str, float]:
    """Load the model that a client holds, and train in this process."""
    held = given.pop("held")
    cache = Path(given.pop("cache"))
    settings = parse(given)
    model = open_model(held)
    computing = set_up(settings, cache)
    adapters = trained(model.plan, settings)
    sequences = client_sequences(settings, simulated_node(), model, 0)
    model.new_skeleton()
    if settings.training.base == "nf4":
        bitsandbytes()
    # Import it now: a later import would count as the model's memory.
    import peft  # noqa: F401

    gc.collect()
    before = peak()
    training = AdapterTraining(
        model, computing, settings, adapters, sequences, settings.seed, cache_folder=cache
    )
    training.run(initial_adapters(adapters, settings.seed), 0, settings.training.steps)
    most = peak()
    return {
        "interpreter_mib": before / MIB,
        "peak_mib": most / MIB,
        "client_mib": (most - before) / MIB,
    }


if __name__ == "__main__":
    print(json.dumps(train(json.loads(sys.argv[1]))))
