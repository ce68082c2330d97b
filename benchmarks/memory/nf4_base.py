"""Savings and costs of a base model in NF4: one client's LoRA training over four bases.

    python -m benchmarks.memory.nf4_base --text FILE [--model DIRECTORY] [--steps 40]
    [--batch-size 8] [--sequence-length 256]

Without ``--model`` a LLaMA of 300 million random weights is made first (bf16, 0.6 GB in a temporary
directory). Each base is measured in a new process per seed. It loads the model, trains, and
evaluates on the last sequences of the text, which are not used in training. Peak memory is measured
until the end of training. For NF4, another process has quantised the model before; that is the
first load. Other bases are loaded once.
On a CPU, seconds are CPU time of all threads of the process; with one thread they depend little on
other work of the machine.
Results go to ``docs/studies/nf4-base-<model>.csv`` row by row (an interrupted study continues
there), and finally to a Markdown table and a plot next to it.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.memory.larger_than_memory import peak
from benchmarks.models.footprint import footprint
from benchmarks.models.random_llama import Shape, save_model
from benchmarks.reporting.panels import Panel, Series, StudyFigure, draw, picture, seeds_note
from benchmarks.reporting.rows import Rows
from benchmarks.reporting.tables import head_of, mean_and_spread
from benchmarks.study_command import add_arguments, exit_status, new_parser
from espalier.data.samples import all_samples
from espalier.data.tasks.encoding import Encoded
from espalier.data.tasks.scored_items import ScoredItems
from espalier.errors import InputError
from espalier.evaluation.scores import score
from espalier.hf.machine.computing import Computing, set_up
from espalier.hf.nf4.matrices import bitsandbytes
from espalier.hf.opening.opened_model import OpenedModel, open_model
from espalier.hf.whole.adapters import put_in, set_values
from espalier.hf.whole.model import load_whole
from espalier.models.adapters import AdapterPlan, adapter_plan
from espalier.results.style import METHODS
from espalier.settings.run import RunSettings, parse
from espalier.storage.blobs import sha256
from espalier.training.initial_values import initial_adapters
from espalier.training.loop import Loop
from espalier.training.sequences import Sequences, encoded_sequences

TITLE = "A base in NF4, bfloat16 and float32"
RANDOM = Shape(1024, 2816, 18, 16, 16)
RANDOM_NAME = "random-300m"
BASES = {
    "float32": ("float32", "float32"),
    "bfloat16": ("bfloat16", "bfloat16"),
    "nf4, computes in float32": ("nf4", "float32"),
    "nf4, computes in bfloat16": ("nf4", "bfloat16"),
}
"""``training.base`` and ``dtype`` by name."""
KEYS = ("seed", "base")
FIGURES = (
    "first_load_seconds", "second_load_seconds", "step_seconds", "interpreter_mib", "peak_mib",
    "gpu_mib", "loss_before", "loss_after",
)  # fmt: skip
MEASURED_WITH = (
    "steps",
    "batch_size",
    "sequence_length",
    "held_out_samples",
    "learning_rate",
    "rank",
    "targets",
    "threads",
)
MIB = 1 << 20


def measure(flat: Mapping[str, Any], cache: Path, train: bool) -> dict[str, float]:
    """Load a base in this process, and optionally train adapters on it.

    Parameters
    ----------
    flat : settings of the run; ``data.path`` is the text
    cache : folder of quantised weights
    train : whether to train and evaluate after loading
    """
    settings = parse(flat)
    computing = set_up(settings, cache)
    model = open_model(settings.model)
    trained, held_out = _sequences(settings, model)
    model.new_skeleton()
    bitsandbytes()
    # Import it now: a later import would count as the model's memory.
    import peft  # noqa: F401

    before = peak()
    started = _seconds(computing)
    whole = load_whole(
        model,
        computing,
        settings.training.base,
        cache_folder=cache,
    )
    found = {"load_seconds": _seconds(computing) - started, "interpreter_mib": before / MIB}
    return found | (_trained(settings, computing, model, whole, trained, held_out) if train else {})


def _trained(
    settings: RunSettings,
    computing: Computing,
    model: OpenedModel,
    whole: Any,
    sequences: Sequences,
    held_out: ScoredItems,
) -> dict[str, float]:
    adapters = adapter_plan(model.plan, settings.lora)
    parameters = put_in(
        whole, model.family, adapters, len(model.plan.blocks), settings.lora.dropout
    )
    set_values(parameters, initial_adapters(adapters, settings.seed))
    flat = {
        f"{key}/{name}": parameter
        for key, block in parameters.items()
        for name, parameter in block.items()
    }
    chosen = settings.training
    steps = settings.training.steps
    loop = Loop(whole, flat, chosen, len(sequences), sequences.batch, settings.seed, steps)
    # The first step loads kernels and fills memory pools, so it is not timed.
    first = loop.run(0, 1)
    started = _seconds(computing)
    loop.run(1, steps - 1, first.moments)
    found = {
        "step_seconds": (_seconds(computing) - started) / (steps - 1),
        "peak_mib": peak() / MIB,
    }
    found["gpu_mib"] = (
        torch.cuda.max_memory_allocated() / MIB if computing.device.type == "cuda" else 0.0
    )
    found["loss_after"] = score(whole, held_out, False, chosen.batch_size, computing.device)["loss"]
    set_values(parameters, initial_adapters(adapters, settings.seed))
    found["loss_before"] = score(whole, held_out, False, chosen.batch_size, computing.device)[
        "loss"
    ]
    return found


def _seconds(computing: Computing) -> float:
    """Return CPU time of this process, or wall time after pending GPU work has finished."""
    if computing.device.type != "cuda":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def _sequences(settings: RunSettings, model: OpenedModel) -> tuple[Sequences, ScoredItems]:
    """Return the training sequences and the held-out items, whose tokens but the first count."""
    path = Path(settings.data.path)
    tokens = settings.data.sequence_length
    samples = all_samples(
        path.read_text(), model.encode, tokens, f"--text {path}", "--sequence-length"
    )
    held_out = settings.evaluation.max_samples
    if not 0 < held_out < len(samples):
        have = f"--text {path} has {len(samples)} samples of {tokens} tokens"
        raise InputError(
            f"--held-out-samples {held_out}: {have}, but some are needed for training and some"
            " held out"
        )
    encoded = [Encoded(tuple(sample.tolist()), tokens - 1) for sample in samples]
    ones = (1,) * held_out
    tests = ScoredItems(tuple(encoded[-held_out:]), ones, (0,) * held_out, ones)
    return encoded_sequences(encoded[:-held_out]), tests


def _in_a_fresh_process(flat: Mapping[str, Any], cache: Path, train: bool) -> dict[str, float]:
    task = json.dumps({"flat": flat, "cache": str(cache), "train": train})
    command = [sys.executable, "-m", "benchmarks.memory.nf4_base", "--measure", task]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise InputError(
            f"{flat['training.base']}: the process that measures it ended with {done.returncode};"
            " see above"
        )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def work(common: Mapping[str, Any], seeds: list[int], rows: Rows) -> None:
    """Measure missing rows; bases take turns, so that all see the same load of the machine."""
    for cell in rows.missing({"seed": seed, "base": base} for seed in seeds for base in BASES):
        base, dtype = BASES[cell["base"]]
        flat = {**common, "seed": cell["seed"], "training.base": base, "dtype": dtype}
        with tempfile.TemporaryDirectory() as cache:
            loads = (
                [_in_a_fresh_process(flat, Path(cache), train=False).pop("load_seconds")]
                if base == "nf4"
                else []
            )
            found = _in_a_fresh_process(flat, Path(cache), train=True)
        loads.append(found.pop("load_seconds"))
        rows.add(
            cell,
            first_load_seconds=loads[0],
            second_load_seconds=loads[1] if loads[1:] else None,
            **found,
        )


def report(rows: Rows, conditions: Mapping[str, Any], path: Path) -> None:
    """Write ``<path>.md`` and the figure."""
    seeds = len({row["seed"] for row in rows.rows})
    over = f"Mean ± sample standard deviation over {seeds} seeds" if seeds > 1 else "One seed"
    clock = "on the wall" if conditions["device"] == "cuda" else "of the process"
    lines = [
        f"# {TITLE}",
        "",
        (
            f"{over}. Model `{conditions['model']['name']}`,"
            f" {conditions['model']['parameters'] / 1e6:.1f} M parameters;"
            f" {conditions['trained']:,} trained; {conditions['steps']} steps of"
            f" {conditions['batch_size']} x {conditions['sequence_length']} tokens;"
            f" {conditions['device']}, threads: {conditions['threads']}; seconds {clock}; loss"
            f" in nats per token of {conditions['held_out_samples']} held-out samples."
            f" [Figures](./{path.name}.csv), [conditions](./{path.name}.json)."
        ),
        "",
    ]
    columns = {
        "weights (computed), MiB": lambda base: f"{conditions['weight_mib'][base]:,.1f}",
        "peak resident memory, MiB": lambda base: _spread(rows, base, "peak_mib", 0),
        "before loading, MiB": lambda base: _spread(rows, base, "interpreter_mib", 0),
        "GPU peak, MiB": lambda base: _spread(rows, base, "gpu_mib", 0),
        "first load, s": lambda base: _spread(rows, base, "first_load_seconds", 2),
        "second load, s": lambda base: _spread(rows, base, "second_load_seconds", 2),
        "step, s": lambda base: _spread(rows, base, "step_seconds", 3),
        "loss before": lambda base: _spread(rows, base, "loss_before", 4),
        "loss after": lambda base: _spread(rows, base, "loss_after", 4),
    }
    if conditions["device"] != "cuda":
        del columns["GPU peak, MiB"]
    lines += head_of(list(columns), numbers=True, first="base")
    lines += [
        f"| {base} | {' | '.join(cell(base) for cell in columns.values())} |" for base in BASES
    ]
    path.with_suffix(".md").write_text("\n".join([*lines, "", picture(path, TITLE), ""]))
    draw(_figure(rows, conditions["device"], seeds), path, TITLE)


def _values(rows: Rows, base: str, figure: str) -> list[float]:
    return [float(row[figure]) for row in rows.rows if row["base"] == base and row[figure]]


def _spread(rows: Rows, base: str, figure: str, digits: int) -> str:
    return mean_and_spread(_values(rows, base, figure), digits, ",")


def _figure(rows: Rows, device: str, seeds: int) -> StudyFigure:
    """Return memory, seconds and loss next to each other, a row per base."""
    memory = "gpu_mib" if device == "cuda" else "peak_mib"
    shown = {
        memory: ("Peak memory", "MiB"),
        "step_seconds": ("Time of a step", "seconds"),
        "loss_after": ("Loss after training", "nats per token"),
    }
    panels = [
        Panel(
            title,
            unit,
            [
                Series(
                    "", METHODS["fedpetuning"], {base: _values(rows, base, name) for base in BASES}
                )
            ],
        )
        for name, (title, unit) in shown.items()
    ]
    return StudyFigure(panels, len(panels), seeds_note(seeds), rows=True)


def _conditions(
    given: argparse.Namespace, model: OpenedModel, adapters: AdapterPlan, device: str
) -> dict[str, Any]:
    size = footprint(model.config)
    weights = {
        name: size.weight_bytes(base, getattr(torch, dtype)) / MIB
        for name, (base, dtype) in BASES.items()
    }
    return {
        "model": {
            "name": given.name or model.directory.name,
            "parameters": size.parameters,
            "sha256": model.sha256,
        },
        "text": {given.text.name: sha256(given.text.read_bytes())},
        "weight_mib": {name: round(value, 3) for name, value in weights.items()},
        "trained": adapters.num_parameters,
        **{key: getattr(given, key) for key in MEASURED_WITH},
        "device": device,
    }


def _arguments() -> argparse.Namespace:
    parser = new_parser("benchmarks.memory.nf4_base", __doc__)
    add_arguments(parser, "sequence-length seeds threads device out", threads=2)
    parser.add_argument("--model", default="", help="directory of a Hugging Face decoder")
    parser.add_argument(
        "--text", type=Path, help="text file to train on; its last samples are held out"
    )
    parser.add_argument("--steps", type=int, default=40, help="at least 2")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--held-out-samples", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--targets", default="attn.q,attn.v")
    parser.add_argument("--measure", default="", help=argparse.SUPPRESS)
    return parser.parse_args()


def study(given: argparse.Namespace) -> None:
    """Measure one model, and write its report."""
    if given.text is None or not given.text.is_file():
        raise InputError(f"--text {given.text}: is no file; name the text to train on")
    if given.steps < 2:
        raise InputError(f"--steps {given.steps}: the first is not timed; give at least 2")
    common = {
        "method": "fedpetuning", "model": given.model, "threads": given.threads,
        "device": given.device, "data.source": "files", "data.path": str(given.text),
        "data.sequence-length": given.sequence_length,
        "evaluation.max-samples": given.held_out_samples, "lora.rank": given.rank,
        "lora.targets": given.targets, "training.steps": given.steps,
        "training.batch-size": given.batch_size, "training.learning-rate": given.learning_rate,
    }  # fmt: skip
    settings = parse(common)
    model = open_model(given.model)
    device = set_up(settings, Path()).device.type
    conditions = _conditions(given, model, adapter_plan(model.plan, settings.lora), device)
    path = given.out / f"nf4-base-{re.sub(r'[^A-Za-z0-9_-]', '-', conditions['model']['name'])}"
    rows = Rows(path.with_suffix(".csv"), KEYS, FIGURES, conditions)
    work(common, given.seeds, rows)
    report(rows, conditions, path)


def main() -> int:
    """Make a model if none is given, measure, and write the report; return 2 after an error."""
    given = _arguments()
    return exit_status(lambda: _work(given))


def _work(given: argparse.Namespace) -> None:
    if given.measure:
        task = json.loads(given.measure)
        print(json.dumps(measure(task["flat"], Path(task["cache"]), task["train"])))
        return
    with tempfile.TemporaryDirectory() as folder:
        given.name = "" if given.model else RANDOM_NAME
        if not given.model:
            torch.manual_seed(0)
            save_model(Path(folder), RANDOM)
            given.model = folder
        study(given)


if __name__ == "__main__":
    sys.exit(main())
