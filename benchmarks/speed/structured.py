"""Size, memory and time of smaller models: 20% and 50% of the blocks' parameters removed.

    python -m benchmarks.speed.structured [--shape 0.1b] [--prompt 128] [--new 16] [--repeats 3]
    [--dtype float32] [--device cpu]

A LLaMA of random weights is made first (bf16, a shard per block, in a temporary directory). The
removed groups are drawn at random, in each block separately (``even``: all blocks keep the same
sizes) or over all blocks (``uneven``). Alternatively, residual dimensions that parts of blocks read
and write are removed, as in SFT-P. The table also has the dense model, and the dense
model with half of its weights set to zero one by one (``unstructured``). Each variant is measured
in a new process per repeat, in turns: opening it from the dense model's files with its structure, a
prompt (prefill), and greedy decoding with a cache, at batch sizes 1 and 8. Figures are medians over
repeats; results go to ``docs/studies/structured-<shape>.json``, ``.md`` and ``.png``.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.memory.larger_than_memory import peak
from benchmarks.models.random_llama import SHAPES, save_model
from benchmarks.reporting.panels import Panel, Reference, Series, StudyFigure, draw, picture
from benchmarks.reporting.tables import head_of
from espalier.hf.export.model import export_edited
from espalier.hf.machine.computing import Computing
from espalier.hf.opening.opened_model import OpenedModel
from espalier.hf.stream.edits import WeightEdit, dense
from espalier.hf.structured.export import export_structured
from espalier.hf.structured.residual_gates import ResidualGates
from espalier.hf.structured.selection import lowest
from espalier.hf.whole.model import load_whole
from espalier.models.groups import Groups
from espalier.models.structure import Structure
from espalier.results.style import METHODS
from espalier.settings.pruning import StructuredSettings

VARIANTS: dict[str, tuple[float, str]] = {
    "dense": (0.0, ""),
    "unstructured, 50%": (0.5, "zeros"),
    "even, 20%": (0.2, "kind"),
    "uneven, 20%": (0.2, "global"),
    "even, 50%": (0.5, "kind"),
    "uneven, 50%": (0.5, "global"),
    "residual dimensions, 20%": (0.2, "residual"),
    "residual dimensions, 50%": (0.5, "residual"),
}
"""Pruning ratio, and the scope in which groups compete, by name."""
DRAWN = {
    "even": ("groups, evenly (LLM-Pruner)", METHODS["llm-pruner"]),
    "uneven": ("groups, unevenly (FLAP)", METHODS["flap"]),
    "residual dimensions": ("residual dimensions (SFT-P)", METHODS["sft-p"]),
    "unstructured": ("single weights set to zero (FedPrLLM)", METHODS["fedprllm"]),
}
"""Label and look in the figure; each kind of removal has the look of a method that does it."""
MIB = 1 << 20
BATCHES = (1, 8)


def structure_of(model: OpenedModel, share: float, selection: str) -> Structure:
    """Return the structure after removing groups, or residual dimensions, with random scores."""
    generator = torch.Generator().manual_seed(0)
    if selection == "residual":
        gates = ResidualGates(model.plan)
        logits = {
            gate: torch.rand(width, generator=generator) for gate, width in gates.widths.items()
        }
        return gates.structure(gates.chosen(logits, gates.target(share, "blocks")))
    job = StructuredSettings(pruning_ratio=share, selection=selection)  # type: ignore[arg-type]
    groups = Groups.of(model.plan)
    scores = torch.rand(len(groups.costs), generator=generator)
    return groups.structure(lowest(groups, scores, job, share))


class EverySecond:
    """Edit that sets half of the weights to zero, one by one."""

    def __call__(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the weight with a checkerboard of zeros."""
        zeros = (torch.arange(weight.shape[0])[:, None] + torch.arange(weight.shape[1])) % 2 == 0
        return weight.masked_fill(zeros, 0)


def disk_bytes(model: OpenedModel, variant: str) -> int:
    """Return the bytes of the weight files of an export."""
    share, selection = VARIANTS[variant]
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "model"
        if selection in ("", "zeros"):

            def edits(index: int) -> dict[str, WeightEdit]:
                return {linear.name: EverySecond() for linear in model.plan.blocks[index].linears}

            export_edited(model, edits if selection else dense, target)
        else:
            export_structured(
                OpenedModel(model.directory, structure_of(model, share, selection)),
                dense,
                target,
                "compact",
            )
        return sum(file.stat().st_size for file in target.glob("*.safetensors"))


@torch.no_grad()
def measure(given: argparse.Namespace, variant: str) -> dict[str, float]:
    """Open a variant and run it, in this process."""
    torch.set_num_threads(given.threads)
    device = torch.device(given.device)
    computing = Computing(device, getattr(torch, given.dtype), given.threads)
    share, selection = VARIANTS[variant]
    model = OpenedModel(Path(given.model))
    if selection not in ("", "zeros"):
        model = OpenedModel(model.directory, structure_of(model, share, selection))
    # Build it now: imports at a later time would count as the model's memory.
    model.new_skeleton()
    before = peak()
    started = time.perf_counter()
    whole = load_whole(model, computing, given.dtype)
    found = {"load_seconds": time.perf_counter() - started, "load_mib": (peak() - before) / MIB}
    found["parameters"] = model.plan.num_parameters
    if selection == "zeros":
        for block in model.plan.blocks:
            for linear in block.linears:
                weight = whole.get_parameter(linear.parameter)
                weight.copy_(EverySecond()(weight.cpu()))
    for batch in BATCHES:
        prompt = torch.arange(batch * given.prompt, device=device).view(batch, -1) % 30000
        whole(input_ids=prompt[:, :8])
        found[f"prefill_{batch}"] = _seconds(
            lambda prompt=prompt: whole(input_ids=prompt, use_cache=True), device
        )
        how: dict[str, Any] = {
            "do_sample": False,
            "pad_token_id": 0,
            "eos_token_id": None,
            "attention_mask": torch.ones_like(prompt),
        }
        one = _seconds(
            lambda prompt=prompt, how=how: whole.generate(prompt, max_new_tokens=1, **how), device
        )
        many = _seconds(
            lambda prompt=prompt, how=how: whole.generate(
                prompt, max_new_tokens=1 + given.new, **how
            ),
            device,
        )
        found[f"decode_{batch}"] = (many - one) / given.new
    found["peak_mib"] = (peak() - before) / MIB
    if device.type == "cuda":
        found["gpu_mib"] = torch.cuda.max_memory_allocated() / MIB
    return found


def _seconds(work: Any, device: torch.device) -> float:
    """Return the seconds of the faster of two tries."""
    tries = []
    for _ in range(2):
        started = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        tries.append(time.perf_counter() - started)
    return min(tries)


def _in_a_fresh_process(given: argparse.Namespace, variant: str) -> dict[str, float]:
    words = [
        f"--{key}={getattr(given, key)}"
        for key in ("prompt", "new", "dtype", "device", "threads", "model")
    ]
    command = [sys.executable, "-m", "benchmarks.speed.structured", "--measure", variant, *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


COLUMNS = {
    "parameters, M": ("parameters", 1e-6, 1),
    "disk, MiB": ("disk_mib", 1, 0),
    "load, s": ("load_seconds", 1, 2),
    "memory to load, MiB": ("load_mib", 1, 0),
    "peak memory, MiB": ("peak_mib", 1, 0),
    "prompt, ms": ("prefill_1", 1e3, 0),
    "prompt, batch of 8, ms": ("prefill_8", 1e3, 0),
    "new token, ms": ("decode_1", 1e3, 1),
    "new token, batch of 8, ms": ("decode_8", 1e3, 1),
}
"""Figure, factor and number of decimals, by heading."""


def report(results: dict[str, Any], path: Path) -> None:
    """Write ``<path>.md`` and the figure."""
    rows = results["rows"]
    conditions = results["conditions"]
    whole = rows["dense"]
    lines = [
        f"# Smaller models relative to the dense model: {conditions['shape']}",
        "",
        (
            f"LLaMA of random weights, {whole['parameters'] / 1e6:,.0f} M parameters,"
            f" {conditions['dtype']} on {conditions['device']}, threads: {conditions['threads']};"
            f" prompt of {conditions['prompt']} tokens, {conditions['new']} new ones; medians of"
            f" {conditions['repeats']} fresh processes each, in turns; memory beyond the"
            " interpreter's; in brackets relative to the dense model."
            f" [Figures](./{path.name}.json)."
        ),
        "",
        *head_of(list(COLUMNS), numbers=True, first="model"),
    ]
    for variant, row in rows.items():
        cells = [
            f"{row[key] * factor:,.{digits}f}"
            + ("" if variant == "dense" else f" ({row[key] / whole[key]:.2f})")
            for key, factor, digits in COLUMNS.values()
        ]
        lines.append(f"| {variant} | {' | '.join(cells)} |")
    title = f"Smaller models relative to the dense model: {conditions['shape']}"
    path.with_name(f"{path.name}.md").write_text("\n".join([*lines, "", picture(path, title), ""]))
    draw(_figure(rows, conditions["repeats"]), path, title)


def _figure(rows: dict[str, dict[str, float]], repeats: int) -> StudyFigure:
    """Return a panel per pruning ratio: a row per measured figure, relative to the dense model."""
    panels = []
    for ratio in ("20%", "50%"):
        series = [
            Series(label, look, {
                head: [rows[f"{name}, {ratio}"][key] / rows["dense"][key]]
                for head, (key, _, _) in COLUMNS.items()
            })
            for name, (label, look) in DRAWN.items()
            if f"{name}, {ratio}" in rows
        ]  # fmt: skip
        panels.append(
            Panel(
                f"{ratio} of the blocks' parameters removed",
                "relative to the dense model (lower is better)",
                series,
                [Reference("dense model", 1.0)],
                start=0.0,
            )
        )
    note = f"Medians of {repeats} processes" if repeats > 1 else "One process"
    return StudyFigure(panels, 2, note, rows=True, height=370)


def main() -> int:
    """Run the study, or one measurement of it with ``--measure``."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.speed.structured",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--shape", default="0.1b", choices=tuple(SHAPES))
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("docs/studies"))
    parser.add_argument("--model", default="", help=argparse.SUPPRESS)
    parser.add_argument("--measure", default="", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        print(json.dumps(measure(given, given.measure)))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder), SHAPES[given.shape])
        given.model = folder
        model = OpenedModel(Path(folder))
        found = dict[str, list[dict[str, float]]]()
        for repeat in range(given.repeats):
            for variant in VARIANTS:
                found.setdefault(variant, []).append(_in_a_fresh_process(given, variant))
                print(f"{repeat + 1}/{given.repeats} {variant}: {found[variant][-1]}", flush=True)
        rows = {
            variant: {key: median(row[key] for row in own) for key in own[0]}
            for variant, own in found.items()
        }
        for variant, row in rows.items():
            row["disk_mib"] = disk_bytes(model, variant) / MIB
    conditions = {
        key: getattr(given, key)
        for key in ("shape", "prompt", "new", "repeats", "dtype", "device", "threads")
    }
    path = given.out / f"structured-{given.shape}"
    results = {"conditions": conditions, "rows": rows}
    path.with_name(f"{path.name}.json").write_text(json.dumps(results, indent=1) + "\n")
    report(results, path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
