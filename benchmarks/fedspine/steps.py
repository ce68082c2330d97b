"""Seconds and memory of a device's training step, by pruning ratio and rank, and of inference.

A LLaMA of random weights, or an encoder for two classes, is made first. Each cell is measured in a
new process, in turns: some steps of LoRA on all matrices of a model with randomly removed groups
(of each kind in each block alike), also while the importance of groups is measured; AdamW on all
weights of the whole model; a forward pass of the smaller model. The table also has the bytes that a
round sends one way.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch

from benchmarks.memory.larger_than_memory import peak
from benchmarks.models import random_llama, random_roberta
from benchmarks.reporting.looks import look_of_arm
from benchmarks.reporting.panels import Panel, Reference, Series, StudyFigure, draw, picture
from benchmarks.reporting.tables import head_of
from benchmarks.speed.structured import structure_of
from espalier.data.tasks.item import Batch
from espalier.errors import InputError
from espalier.hf.machine.computing import Computing
from espalier.hf.opening.opened_model import OpenedModel
from espalier.hf.whole.model import load_whole
from espalier.methods.tuning.fedspine import FedSpineSettings
from espalier.models.adapters import AdapterPlan, adapter_plan
from espalier.settings.run import RunSettings, parse
from espalier.training.adapter_training import AdapterTraining
from espalier.training.group_importance import GroupImportance
from espalier.training.initial_values import initial_values
from espalier.training.loop import Loop
from espalier.training.sequences import Sequences, text_sequences

Score = Literal["exact", "mask"]
RATIOS = (0.0, 0.3, 0.5)
RANKS = (2, 8, 32)
ALL = "all weights"
TENS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)
"""Pruning ratios for rank 8, with and without scores, and for inference (the paper's table 1)."""
MEASURED: Mapping[str, Score] = {", measuring units": "exact", ", measuring units by masks": "mask"}
"""Suffixes of cell names, with FedSpine's and FedAPT's score of groups."""
INFERENCE = ", a forward pass"
"""Suffix of cell names for the smaller model without LoRA."""
USUAL = RANKS[1]
METHODS = {
    ALL: (ALL, ALL, "p = 0%"),
    "FedPETuning": ("p = 0%, r = 8", "p = 0%, r = 8", "p = 0%"),
    "HetLoRA, rank 2": ("p = 0%, r = 2", "p = 0%, r = 2", "p = 0%"),
    "LLMPruner + FedLoRA": ("p = 50%, r = 8", "p = 50%, r = 8", "p = 50%"),
    "FedLoRA + Prune": ("p = 0%, r = 8", "p = 0%, r = 8", "p = 50%"),
    "FedAPT": (
        "p = 0%, r = 8, measuring units by masks",
        "p = 50%, r = 8, measuring units by masks",
        "p = 50%",
    ),
    "FedSpine": ("p = 0%, r = 8, measuring units", "p = 50%, r = 8, measuring units", "p = 50%"),
}
"""Cells of a method's first round, its last round, and its result.

FedSpine chooses its ranks; 8 is the highest here.
"""
TITLE = "What a step costs a device"
CONDITIONS = ("shape", "batch", "tokens", "steps", "repeats", "threads")
COLUMNS = {
    "trained, M": ("trained", 1e-6, 2), "a step, s": ("seconds", 1, 2),
    "peak memory, MiB": ("peak_mib", 1, 0), "a round one way, MiB": ("sent_mib", 1, 2),
}  # fmt: skip
"""Figure, factor and number of decimals, by heading."""
PASS = (("seconds", 3), ("peak_mib", 0))
"""Figure and number of decimals, for a forward pass."""
MIB = 1 << 20
CLASSES = 2
NUM_SEQUENCES = 64
VOCABULARY = 30000
Steps = Callable[[int, int], object]
"""Function that takes steps, given the number of the first one and their count."""


def cells() -> dict[str, tuple[float, int, Score | None] | None]:
    """Return ratio, rank and score of each cell, by name.

    Rank 0 means a forward pass only; None means training of all weights.
    """
    found: dict[str, tuple[float, int, Score | None] | None] = {ALL: None}
    pairs = sorted({*product(RATIOS, RANKS), *product(TENS, [USUAL])})
    found |= {f"p = {ratio:.0%}, r = {rank}": (ratio, rank, None) for ratio, rank in pairs}
    for end, how in MEASURED.items():
        found |= {f"p = {ratio:.0%}, r = {USUAL}{end}": (ratio, USUAL, how) for ratio in TENS}
    return found | {f"p = {ratio:.0%}{INFERENCE}": (ratio, 0, None) for ratio in TENS}


def measure(given: argparse.Namespace, cell: str) -> dict[str, float]:
    """Measure one cell in this process."""
    torch.set_num_threads(given.threads)
    chosen = cells()[cell]
    ratio, rank, how = chosen or (0.0, RANKS[0], None)
    whole = OpenedModel(Path(given.model))
    model = OpenedModel(whole.directory, structure_of(whole, ratio, "kind")) if ratio else whole
    settings = _settings(given, rank or RANKS[0], how or "exact")
    # Import and build now: at a later time it would count as the training's memory.
    model.new_skeleton(_classes(model))
    _adapters(model, settings)
    before = peak()
    if chosen is None:
        steps, trained = _of_all(model, settings, given)
    else:
        steps, trained = (
            _of_lora(model, settings, given, how is not None)
            if rank
            else (_of_inference(model, given), 0)
        )
    # The first step allocates what later steps reuse.
    steps(0, 1)
    started = time.perf_counter()
    steps(1, given.steps)
    seconds = (time.perf_counter() - started) / given.steps
    return {
        "seconds": seconds,
        "peak_mib": (peak() - before) / MIB,
        "gone": 1 - _in_units(model) / _in_units(whole),
        "trained": trained,
        "sent_mib": 4 * trained / MIB,
    }


def _in_units(model: OpenedModel) -> int:
    """Return the number of weights in prunable groups: all matrices of the blocks."""
    return sum(linear.num_weights for block in model.plan.blocks for linear in block.linears)


def _settings(given: argparse.Namespace, rank: int, score: Score) -> RunSettings:
    chosen = {
        "lora.rank": rank,
        "lora.alpha": float(rank),
        "lora.targets": "all",
        "training.batch-size": given.batch,
    }
    return parse(
        {
            "method": "fedspine",
            "fedspine.score": score,
            "fedspine.normalise": True,
            "training.steps": given.steps + 1,
            **chosen,
        }
    )


def _classified(texts: list[tuple[torch.Tensor, torch.Tensor]]) -> Batch:
    """Return a batch of random texts, which all have the same length, with their classes."""
    token_ids = torch.stack([own for own, _ in texts])
    return Batch(token_ids, torch.ones_like(token_ids), torch.stack([label for _, label in texts]))


def _classes(model: OpenedModel) -> int | None:
    """Return the number of classes of an encoder; None for a language model."""
    return CLASSES if model.family.kind == "encoder" else None


def _adapters(model: OpenedModel, settings: RunSettings) -> AdapterPlan:
    return adapter_plan(model.plan, settings.lora, _classes(model) or 0)


def _token_ids(given: argparse.Namespace) -> torch.Tensor:
    """Return random token ids, (sequences, tokens), int64."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(VOCABULARY, (NUM_SEQUENCES, given.tokens), generator=generator)


def _sequences(model: OpenedModel, given: argparse.Namespace) -> Sequences:
    token_ids = _token_ids(given)
    if _classes(model) is None:
        return text_sequences(token_ids)
    classes = torch.arange(NUM_SEQUENCES) % CLASSES
    return Sequences((list(zip(token_ids, classes, strict=True)),), _classified)


def _computing(given: argparse.Namespace) -> Computing:
    return Computing(torch.device("cpu"), torch.float32, given.threads)


def _of_lora(
    model: OpenedModel, settings: RunSettings, given: argparse.Namespace, measured: bool
) -> tuple[Steps, int]:
    """Return a function that takes LoRA steps, and the number of trained parameters."""
    adapters = _adapters(model, settings)
    watch = GroupImportance(
        model, adapters, lambda: training.adapted, settings.of(FedSpineSettings)
    )
    training = AdapterTraining(
        model,
        _computing(given),
        settings,
        adapters,
        _sequences(model, given),
        0,
        observer=watch if measured else None,
    )
    first = initial_values(model, adapters, 0)
    if not measured:
        return lambda step, number: training.run(first, step, number), adapters.num_parameters

    def watched(step: int, number: int) -> None:
        with watch.watching():
            training.run(first, step, number)

    return watched, adapters.num_parameters


def _of_all(
    model: OpenedModel, settings: RunSettings, given: argparse.Namespace
) -> tuple[Steps, int]:
    """Return a function that takes steps on all weights, in float32 as the adapters are."""
    whole = load_whole(model, _computing(given), "float32", num_labels=_classes(model))
    sequences = _sequences(model, given)
    parameters = dict(whole.named_parameters())
    for value in parameters.values():
        value.requires_grad_(True)
    loop = Loop(
        whole, parameters, settings.training, len(sequences), sequences.batch, 0, given.steps + 1
    )
    return loop.run, sum(value.numel() for value in parameters.values())


def _of_inference(model: OpenedModel, given: argparse.Namespace) -> Steps:
    """Return a function that does forward passes over batches, with all logits."""
    whole = load_whole(model, _computing(given), "float32", num_labels=_classes(model))
    token_ids = _token_ids(given)
    alone = {"use_cache": False} if _classes(model) is None else {}

    @torch.no_grad()
    def forward(first: int, number: int) -> None:
        for step in range(first, first + number):
            whole(
                input_ids=token_ids[
                    (step * given.batch + torch.arange(given.batch)) % len(token_ids)
                ],
                **alone,
            )

    return forward


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command-line arguments of the study."""
    parser.add_argument(
        "--shape", default="0.1b", choices=(*random_llama.SHAPES, *random_roberta.SHAPES)
    )
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--only",
        nargs="+",
        default=[""],
        help="measure cells with one of these in their names; others stay as they are",
    )
    parser.add_argument("--out", type=Path, default=Path("docs/studies"))
    parser.add_argument("--model", default="", help=argparse.SUPPRESS)
    parser.add_argument("--measure", default="", help=argparse.SUPPRESS)


def work(given: argparse.Namespace) -> None:
    """Measure all cells and write ``fedspine-steps-<shape>``, or measure one with ``--measure``."""
    if given.measure:
        print(json.dumps(measure(given, given.measure)))
        return
    found: dict[str, list[dict[str, float]]] = {
        cell: [] for cell in cells() if _wanted(given, cell)
    }
    conditions = {key: getattr(given, key) for key in CONDITIONS}
    kept = _kept(given, conditions)
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder), given.shape)
        given.model = folder
        for repeat, cell in product(range(given.repeats), found):
            found[cell].append(_in_a_fresh_process(given, cell))
            print(f"{repeat + 1}/{given.repeats} {cell}: {found[cell][-1]}", flush=True)
    rows = {
        cell: {
            key: (min if key == "seconds" else median)(row[key] for row in own) for key in own[0]
        }
        for cell, own in found.items()
    }
    results = {"conditions": conditions, "rows": {cell: (kept | rows)[cell] for cell in cells()}}
    path = _path(given)
    path.write_text(json.dumps(results, indent=1) + "\n")
    report(results, path)


def save_model(folder: Path, shape: str) -> None:
    """Write the model of a named shape."""
    if shape in random_roberta.SHAPES:
        random_roberta.save_model(folder, random_roberta.SHAPES[shape])
    else:
        random_llama.save_model(folder, random_llama.SHAPES[shape])


def _path(given: argparse.Namespace) -> Path:
    """Return the path of the figures."""
    out: Path = given.out
    return out / f"fedspine-steps-{given.shape}.json"


def _wanted(given: argparse.Namespace, cell: str) -> bool:
    return any(words in cell for words in given.only)


def _kept(given: argparse.Namespace, conditions: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Return the rows that are not measured again.

    Raises
    ------
    InputError
        They do not exist, or were measured under other conditions.
    """
    path = _path(given)
    wanted = [cell for cell in cells() if not _wanted(given, cell)]
    if not wanted:
        return {}
    there = json.loads(path.read_text()) if path.exists() else {"conditions": None, "rows": {}}
    if there["conditions"] != conditions or not set(wanted) <= set(there["rows"]):
        raise InputError(
            f"--only {' '.join(given.only)}: {path} has not all other rows, or others' conditions;"
            " measure all cells"
        )
    return {cell: there["rows"][cell] for cell in wanted}


def _in_a_fresh_process(given: argparse.Namespace, cell: str) -> dict[str, float]:
    words = [
        f"--{key}={getattr(given, key)}" for key in ("batch", "tokens", "steps", "threads", "model")
    ]
    command = [sys.executable, "-m", "benchmarks.fedspine", "steps", "--measure", cell, *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    read: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return read


def report(results: dict[str, Any], path: Path) -> None:
    """Write Markdown and a plot next to the figures."""
    conditions = results["conditions"]
    passes = {cell: row for cell, row in results["rows"].items() if cell.endswith(INFERENCE)}
    rows = {cell: row for cell, row in results["rows"].items() if cell not in passes}
    plain = rows[f"p = {0:.0%}, r = {USUAL}"]
    lines = [
        f"# {TITLE}",
        "",
        (
            f"{_described(conditions['shape'])}, float32 on the CPU, threads:"
            f" {conditions['threads']}; {conditions['batch']} sequences of {conditions['tokens']}"
            f" tokens; {conditions['repeats']} fresh processes each, in turns with what was"
            " measured along with them: the fastest one's seconds, of other figures medians;"
            f" memory beyond the interpreter's. In brackets the share of LoRA of rank {USUAL} on"
            " the whole model. p is what was asked for; as whole heads go,"
            f" {', '.join(f'{_gone(rows, ratio):.1%}' for ratio in TENS[1:])} of the units' weights"
            f" went. [Figures](./{path.name})."
        ),
        "",
        *head_of(list(COLUMNS), numbers=True),
    ]
    for name, row in rows.items():
        texts = [
            f"{row[key] * factor:,.{digits}f} ({row[key] / plain[key]:.2f})"
            for key, factor, digits in COLUMNS.values()
        ]
        lines.append(f"| {name} | {' | '.join(texts)} |")
    lines += [
        "",
        (
            "A forward pass of the smaller model without LoRA, in brackets the share of the whole"
            " model's:"
        ),
        "",
    ]
    lines += ["| | a pass, s | peak memory, MiB |", "|---|---:|---:|"]
    whole = passes[f"p = {0:.0%}{INFERENCE}"]
    for name, row in passes.items():
        seconds, memory = (
            f"{row[key]:,.{digits}f} ({row[key] / whole[key]:.2f})" for key, digits in PASS
        )
        lines.append(f"| {name} | {seconds} | {memory} |")
    lines += ["", *_by_method(results["rows"])]
    figure = path.with_suffix("")
    path.with_suffix(".md").write_text("\n".join([*lines, "", picture(figure, TITLE), ""]))
    draw(_figure(rows), figure, TITLE)


def _described(shape: str) -> str:
    family = "RoBERTa with a head of two classes" if shape in random_roberta.SHAPES else "LLaMA"
    return f"{family} of random weights ({shape})"


def _gone(rows: Mapping[str, Mapping[str, float]], ratio: float) -> float:
    return rows[f"p = {ratio:.0%}, r = {USUAL}"]["gone"]


def _by_method(rows: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Return a table of each method's cost at a pruning ratio of 50%.

    It has the first and last round, and the resulting model.
    """
    lines = ["By method, where half of the units is to go:", ""]
    lines += [
        "| | a step, s, first and last round | peak memory of training, MiB | a pass, s | peak"
        " memory in use, MiB |"
    ]
    lines += ["|---|---:|---:|---:|---:|"]
    for method, (first, last, end) in METHODS.items():
        steps, memory = (
            [rows[cell][key] for cell in (first, last)] for key in ("seconds", "peak_mib")
        )
        texts = [f"{steps[0]:.2f}, {steps[1]:.2f}", f"{memory[0]:,.0f}, {memory[1]:,.0f}"]
        texts += [
            f"{rows[end + INFERENCE]['seconds']:.3f}",
            f"{rows[end + INFERENCE]['peak_mib']:,.0f}",
        ]
        lines.append(f"| {method} | {' | '.join(texts)} |")
    return lines


def _figure(rows: Mapping[str, Mapping[str, float]]) -> StudyFigure:
    """Return seconds and memory over the ratio: by rank, and by the way groups are measured."""
    fedspine = look_of_arm("FedSpine")
    by_rank = {
        f"rank {rank}": (
            fedspine.variant(number),
            f", r = {rank}",
            TENS if rank == USUAL else RATIOS,
        )
        for number, rank in enumerate((USUAL, *(rank for rank in RANKS if rank != USUAL)))
    }
    scores = {
        "importance by gradients (FedSpine)": fedspine,
        "importance by masks (FedAPT)": look_of_arm("FedAPT"),
    }
    by_score = {
        label: (look.variant(1), f", r = {USUAL}{end}", TENS)
        for (label, look), end in zip(scores.items(), MEASURED, strict=True)
    }
    plain = {f"rank {USUAL}": by_rank[f"rank {USUAL}"]}
    panels = [
        Panel(
            heading,
            unit,
            [
                Series(
                    label,
                    look,
                    {100 * ratio: [rows[f"p = {ratio:.0%}{end}"][key]] for ratio in ratios},
                )
                for label, (look, end, ratios) in lines.items()
            ],
            [Reference("all weights trained", rows[ALL][key])],
            "pruned groups, %",
            start=0.0,
        )
        for heading, lines in (
            ("By LoRA rank", by_rank),
            ("While importance is measured", plain | by_score),
        )
        for key, unit in (("seconds", "seconds per step"), ("peak_mib", "peak memory, MiB"))
    ]
    return StudyFigure(panels, 2, height=240)
