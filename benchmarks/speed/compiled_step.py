"""Time of a training step with and without ``training.compile``, on one model in one process.

    python -m benchmarks.speed.compiled_step [--model demo] [--tokens 256] [--steps 12]

LoRA on all linear layers, float32, batches of 4 random sequences. Plain and compiled steps take
turns of ``--steps`` steps, after a first step of each that is not counted; the first compiled step
contains the compilation and is printed by itself. Losses must agree to 0.1%.
"""

import argparse
import statistics
import time

import torch

from espalier.data.tasks.encoding import Encoded
from espalier.hf.machine.computing import Computing
from espalier.hf.opening.opened_model import open_model
from espalier.models.adapters import adapter_plan
from espalier.settings.run import parse
from espalier.training.adapted_model import AdaptedModel, flattened
from espalier.training.initial_values import initial_adapters
from espalier.training.loop import Loop
from espalier.training.sequences import encoded_sequences

TURNS = 3


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--steps", type=int, default=12)
    given = parser.parse_args()
    settings = parse({"method": "fedpetuning", "model": given.model})
    model = open_model(given.model)
    computing = Computing(torch.device("cpu"), torch.float32, torch.get_num_threads())
    adapters = adapter_plan(model.plan, settings.lora)
    adapted = AdaptedModel.load(model, computing, settings, adapters)
    start = initial_adapters(adapters, settings.seed)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(model.num_embeddings or 1, (64, given.tokens), generator=generator)
    sequences = encoded_sequences([Encoded(tuple(row), len(row) - 1) for row in rows.tolist()])

    def run(compiled: bool, first: int, steps: int) -> tuple[float, list[float]]:
        adapted.set(start)
        chosen = settings.training.model_copy(update={"compile": compiled})
        loop = Loop(
            adapted.whole, flattened(adapted.parameters), chosen, 64, sequences.batch, 0, 99
        )
        begun = time.perf_counter()
        trained = loop.run(first, steps)
        return (time.perf_counter() - begun) / steps, trained.losses

    first = {compiled: run(compiled, 0, 1)[0] for compiled in (False, True)}
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(TURNS):
        losses = {}
        for compiled, found in seconds.items():
            each, losses[compiled] = run(compiled, 1 + turn * given.steps, given.steps)
            found.append(each)
        torch.testing.assert_close(
            torch.tensor(losses[True]), torch.tensor(losses[False]), rtol=1e-3, atol=0
        )
    plain = statistics.median(seconds[False])
    fast = statistics.median(seconds[True])
    print("| step | first | later, median of 3 turns | ratio |\n|---|---|---|---|")
    print(f"| plain | {first[False]:.2f} s | {plain:.3f} s | 1 |")
    print(f"| compiled | {first[True]:.2f} s | {fast:.3f} s | {fast / plain:.2f} |")


if __name__ == "__main__":
    main()
