"""Fuzzing with random and mutated inputs of every kind; they may only lead to a ``InputError``.

    python -m benchmarks.fuzz --inputs 1000000

Inputs are distributed over the targets: settings of runs and nodes, messages in both directions,
safetensors blobs, the checkpoint of a resumed run, Flower bundles, nested JSON, and tokenizer
files. It prints the outcomes per target, and returns 1 after any other exception. Every input has a
number; ``--target letters --first 4711 --inputs 1`` repeats one.
"""

import argparse
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from benchmarks.fuzz.targets import Target, targets
from espalier.errors import INTERRUPTS, EspalierError

TAKEN = "taken"
MISTAKE = "EspalierError"
SHOWN = 5
"""Maximum number of unexpected exceptions per target that are listed."""


@dataclass
class Outcome:
    """Outcomes of the inputs of one target."""

    counts: Counter[str] = field(default_factory=Counter)
    """Number of inputs by outcome: ``taken``, ``InputError``, or the name of another exception."""
    foreign: list[str] = field(default_factory=list)
    """First unexpected exceptions, with the numbers of their inputs."""
    longest: int = 0
    """Characters of the longest message of a InputError."""


def fuzz(name: str, target: Target, seed: int, numbers: range) -> Outcome:
    """Pass the inputs with these numbers to a target."""
    outcome = Outcome()
    for number in numbers:
        drawn = target(Random(f"{seed}/{name}/{number}"))
        # An error before the first yield is a fault of the benchmark, so it is not caught.
        next(drawn)
        try:
            next(drawn, None)
        except EspalierError as error:
            outcome.counts[MISTAKE] += 1
            outcome.longest = max(outcome.longest, len(str(error)))
        except INTERRUPTS:
            raise
        except BaseException as error:
            kind = type(error).__name__
            outcome.counts[kind] += 1
            if len(outcome.foreign) < SHOWN:
                outcome.foreign.append(f"{name} {number}: {kind}: {str(error)[:200]!r}")
        else:
            outcome.counts[TAKEN] += 1
    return outcome


def main() -> int:
    """Fuzz, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--inputs", type=int, default=1_000_000, help="of all targets together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", help="give all inputs to this one")
    parser.add_argument("--first", type=int, default=0, help="number of each target's first input")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        known = targets(Path(folder))
        if given.target and given.target not in known:
            parser.error(f"--target is one of {', '.join(known)}")
        chosen = {name: target for name, target in known.items() if given.target in (None, name)}
        print(
            "| target | inputs | accepted | InputError | other exceptions | inputs per second"
            " of CPU |\n|---|---|---|---|---|---|",
            flush=True,
        )
        foreign: list[str] = []
        for place, (name, target) in enumerate(chosen.items()):
            number = len(range(place, given.inputs, len(chosen)))
            started = time.process_time()
            outcome = fuzz(name, target, given.seed, range(given.first, given.first + number))
            pace = number / max(1e-9, time.process_time() - started)
            others = {
                kind: count
                for kind, count in outcome.counts.items()
                if kind not in (TAKEN, MISTAKE)
            }
            told = (
                ", ".join(f"{kind} {count:,}" for kind, count in sorted(others.items())) or "none"
            )
            counts = (
                f"{outcome.counts[TAKEN]:,} | {outcome.counts[MISTAKE]:,} | {told} | {pace:,.0f}"
            )
            print(f"| {name} | {number:,} | {counts} |", flush=True)
            foreign += outcome.foreign
    print("".join(f"\n{line}" for line in foreign), end="\n" if foreign else "")
    return 1 if foreign else 0


if __name__ == "__main__":
    sys.exit(main())
