"""Time of a training step in several ways, with one model in one process.

    python -m benchmarks.speed.training_step [--model demo] [--tokens 256] [--steps 12]
        [--base bfloat16] [--ways plain compiled eager]

``plain`` is a step with the default settings, ``compiled`` one with ``training.compile``, ``eager``
one with ``attention=eager``. LoRA on all linear layers, batches of 4 random sequences. The ways
take turns of ``--steps`` steps, after a first step of each that is not counted; the first compiled
step contains the compilation and is printed alone. Losses must agree to 0.1%, with bfloat16 to 1%.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from espalier.data.tasks.encoding import Encoded
from espalier.hf.machine.computing import Computing
from espalier.hf.opening.opened_model import OpenedModel, open_model
from espalier.models.adapters import adapter_plan
from espalier.settings.run import parse
from espalier.training.adapted_model import AdaptedModel, flattened
from espalier.training.initial_values import initial_adapters
from espalier.training.loop import Loop
from espalier.training.sequences import encoded_sequences

TURNS = 3
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "compiled": {"training.compile": True},
    "eager": {"attention": "eager"},
}
"""Settings of each way."""
TOLERANCE = {"float32": 1e-3, "bfloat16": 1e-2}
"""Relative difference of losses, by ``training.base``."""

Run = Callable[[int, int], tuple[float, list[float]]]
"""Function of the number of the first step and the number of steps: seconds per step, losses."""


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--base", choices=sorted(TOLERANCE), default="float32")
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    given = parser.parse_args()
    model = open_model(given.model)
    ways = {name: _way(model, name, given.base, given.tokens) for name in given.ways}
    first = {name: run(0, 1)[0] for name, run in ways.items()}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(TURNS):
        losses = {}
        for name, run in ways.items():
            each, losses[name] = run(1 + turn * given.steps, given.steps)
            seconds[name].append(each)
        expected, *others = (torch.tensor(found) for found in losses.values())
        for found in others:
            torch.testing.assert_close(found, expected, rtol=TOLERANCE[given.base], atol=0)
    medians = {name: statistics.median(found) for name, found in seconds.items()}
    reference = medians[given.ways[0]]
    print("| step | first | later, median of 3 turns | ratio |\n|---|---|---|---|")
    for name, median in medians.items():
        print(f"| {name} | {first[name]:.2f} s | {median:.3f} s | {median / reference:.2f} |")


def _way(model: OpenedModel, name: str, base: str, tokens: int) -> Run:
    """Return a function that trains adapters from their initial values."""
    settings = parse(
        {
            "method": "fedpetuning",
            "model": str(model.directory),
            "training.base": base,
            **WAYS[name],
        }
    )
    computing = Computing(
        torch.device("cpu"), torch.float32, torch.get_num_threads(), attention=settings.attention
    )
    adapters = adapter_plan(model.plan, settings.lora)
    adapted = AdaptedModel.load(model, computing, settings, adapters)
    start = initial_adapters(adapters, settings.seed)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(model.num_embeddings or 1, (64, tokens), generator=generator)
    sequences = encoded_sequences([Encoded(tuple(row), len(row) - 1) for row in rows.tolist()])

    def run(first: int, steps: int) -> tuple[float, list[float]]:
        adapted.set(start)
        loop = Loop(
            adapted.whole,
            flattened(adapted.parameters),
            settings.training,
            64,
            sequences.batch,
            0,
            99,
        )
        begun = time.perf_counter()
        trained = loop.run(first, steps)
        return (time.perf_counter() - begun) / steps, trained.losses

    return run


if __name__ == "__main__":
    main()
