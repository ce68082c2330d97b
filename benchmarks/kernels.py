"""How close are the kernels to the memory's speed, and how far from a plain implementation? Prints a Markdown table.

    python benchmarks/kernels.py [--rows 4096] [--columns 11008] [--voters 64] [--threads 2]

Everything is measured in one run, on one matrix, best of several repetitions after the kernels were compiled; each result
is compared bit by bit with the plain one, and a difference ends the run. Plain is what the papers' code does: a stable
``torch.sort`` and a scatter for a client's mask; ``int32 += bool`` and a ``torch.sort`` for the votes.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from numba import njit, prange

from pruning_kernels import selection
from pruning_kernels.bitmask import pack, unpack
from pruning_kernels.local import LocalMetric, LocalPruning
from pruning_kernels.votes import VoteCounter, magnitudes, select_most_voted

NEVER = 1 << 62


def seconds(work: Callable[[], Any], times: int = 5) -> tuple[float, Any]:
    """Shortest time of several, and the result."""
    best, result = float("inf"), None
    for _ in range(times):
        started = time.perf_counter()
        result = work()
        best = min(best, time.perf_counter() - started)
    return best, result


@njit(parallel=True)
def read_all(words: np.ndarray) -> np.uint64:
    """Read every word once."""
    total = np.uint64(0)
    for part in prange(len(words) // 4096):
        found = np.uint64(0)
        for word in range(part * 4096, (part + 1) * 4096):
            found ^= words[word]
        total += found
    return total


def require_equal(found: Any, expected: Any, what: str) -> None:
    """End the run if the kernels' bits are not those of the plain implementation."""
    if not np.array_equal(np.asarray(found), np.asarray(expected)):
        raise SystemExit(f"{what}: the result differs from the plain implementation's")


def row(what: str, ours: float, plain: float, name: str) -> None:
    """A line of the table."""
    ratio = f"{plain / ours:.0f} times faster" if plain > 2 * ours else f"{ours / plain:.2f} times its time"
    print(f"| {what} | {1000 * ours:.1f} ms | {name}: {1000 * plain:.1f} ms | {ratio} |", flush=True)


def measure_votes(shape: tuple[int, int], voters: int, generator: np.random.Generator) -> None:
    """Count votes, and select by them, against reading them and against the plain way."""
    # votes that agree as clients' do: each weight has a probability of its own
    probability = torch.from_numpy(generator.beta(0.3, 0.3, shape).astype(np.float32))
    masks = np.stack([pack(torch.bernoulli(probability).bool().numpy()) for _ in range(voters)])
    weight = torch.from_numpy(generator.standard_normal(shape, dtype=np.float32)).to(torch.bfloat16)
    sizes = magnitudes(weight)
    flat = masks.reshape(-1)
    read_all(flat[:8192])
    reading, _ = seconds(lambda: read_all(flat))

    counter = VoteCounter(shape, voters)
    counter.count(masks)
    counting, _ = seconds(lambda: counter.count(masks))
    row(f"count {voters} masks of {shape[0]} x {shape[1]}", counting, reading, "read them")

    votes = [torch.from_numpy(unpack(mask, shape)) for mask in masks]

    def add() -> torch.Tensor:
        counts = torch.zeros(shape, dtype=torch.int32)
        for vote in votes:
            counts += vote
        return counts

    adding, counts = seconds(add, 1)
    require_equal(counter.counts(), counts, "counts")
    lines = {"layer": (counts.reshape(-1), 0), "row": (counts, 1), "column": (counts, 0)}
    for group, (line, dim) in lines.items():
        counter.most_voted(0.5, group, sizes)
        selecting, found = seconds(partial(counter.most_voted, 0.5, group, sizes), 3)
        sorting, _ = seconds(partial(torch.sort, line, dim=dim, descending=True, stable=True), 1)
        require_equal(found, pack(select_most_voted(counter.counts(), 0.5, group, sizes)), f"votes by {group}")
        row(f"select by {group}, ties by magnitude", selecting, sorting, "torch.sort")
        if group == "layer":
            row("count and select by layer", counting + selecting, adding + sorting, "int32 += bool, torch.sort")
            row("count and select by layer", counting + selecting, reading, "read them")


def measure_masks(shape: tuple[int, int], generator: np.random.Generator) -> None:
    """Score and select against a stable sort and a scatter."""
    weight = torch.from_numpy(generator.standard_normal(shape, dtype=np.float32))
    square_sum = torch.from_numpy(generator.random(shape[1]) * 9)
    worth = selection.WORTH_COMPILING
    measured: list[tuple[LocalMetric, str]] = [("wanda", "row"), ("wanda", "layer"), ("wanda", "column"), ("wanda", "2:4")]
    measured += [("ria", "row"), ("magnitude", "layer")]
    for metric, group in measured:
        local = LocalPruning(metric, 0.5, group)
        local.prune_mask(weight, square_sum)
        ours, found = seconds(partial(local.prune_mask, weight, square_sum), 3)
        selection.WORTH_COMPILING = NEVER
        plain, expected = seconds(partial(local.prune_mask, weight, square_sum), 1)
        selection.WORTH_COMPILING = worth
        require_equal(found, expected, f"{metric} by {group}")
        row(f"{metric} mask by {group}", ours, plain, "stable sort, scatter")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--columns", type=int, default=11008)
    parser.add_argument("--voters", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    shape, generator = (given.rows, given.columns), np.random.default_rng(0)
    print(f"{given.threads} threads, a matrix of {given.rows} x {given.columns}, equal bits in every line\n")
    print("| what | time | against | |\n|---|---|---|---|")
    measure_votes(shape, given.voters, generator)
    measure_masks(shape, generator)


if __name__ == "__main__":
    main()
