"""Speed of the pruning kernels relative to memory speed and plain code, as a Markdown table.

    python benchmarks/speed/kernels.py [--rows 4096] [--columns 11008] [--voters 64] [--threads 2]
    [--device cuda]

All measurements are in one run on one matrix. Each is the best of several repetitions after a first
one (two for the plain code, which takes seconds). Each result is compared bit by bit with the plain
one, and a difference ends the run. The plain code is that of the papers: a stable ``torch.sort``
and a scatter for a client's mask, and for votes by row and by column, where the lower index
precedes at equal votes; ``int32 += bool`` and a ``torch.sort`` for votes by layer.

With ``--device cuda`` the kernels for that device are measured. They are compared with copying
their input on the device, which takes twice as long as reading it. Each result is compared bit by
bit with that of the CPU.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from numba import njit, prange

from pruning_kernels.selection import selection
from pruning_kernels.selection.local_pruning import LocalMetric, LocalPruning
from pruning_kernels.votes.bitmask import num_words, pack, stack_of_masks, unpack
from pruning_kernels.votes.vote_counter import vote_counter
from pruning_kernels.votes.votes import magnitudes, select_most_voted

NEVER = 1 << 62


def seconds(work: Callable[[], Any], times: int = 5) -> tuple[float, Any]:
    """Return the shortest of several times in seconds, and the result."""
    best = float("inf")
    result = None
    for _ in range(times):
        started = time.perf_counter()
        result = work()
        best = min(best, time.perf_counter() - started)
    return best, result


def in_turn(
    first: Callable[[], Any], second: Callable[[], Any], times: int = 15
) -> tuple[float, float]:
    """Return the shortest times of two functions that are run alternately.

    A machine that becomes slower or faster thus affects both.
    """
    pairs = [(seconds(first, 1)[0], seconds(second, 1)[0]) for _ in range(times)]
    return min(pair[0] for pair in pairs), min(pair[1] for pair in pairs)


@njit(parallel=True)
def read_all(words: np.ndarray) -> np.uint64:
    """Read every word once."""
    total = np.uint64(0)
    for part in prange(len(words) // 4096):
        found = np.uint64(0)
        # Without a slice of its own, compilers do not vectorize the loop.
        tile = words[part * 4096 : (part + 1) * 4096]
        for word in range(4096):
            found |= tile[word]
        total += found
    return total


def require_equal(found: Any, expected: Any, what: str) -> None:
    """End the run if the kernels' bits differ from those of the plain implementation."""
    if not np.array_equal(np.asarray(found), np.asarray(expected)):
        raise SystemExit(f"{what}: the result differs from the plain implementation's")


def row(what: str, ours: float, plain: float, name: str) -> None:
    """Print a line of the table."""
    times = plain / ours
    ratio = (
        f"{times:.{0 if times >= 10 else 1}f} times faster"
        if times > 2
        else f"{ours / plain:.2f} times its time"
    )
    print(
        f"| {what} | {1000 * ours:.1f} ms | {name}: {1000 * plain:.1f} ms | {ratio} |", flush=True
    )


def measure_votes(shape: tuple[int, int], voters: int, generator: np.random.Generator) -> None:
    """Measure counting and selecting votes, against reading them and against plain code."""
    masks = voted_masks(shape, voters, generator)
    weight = torch.from_numpy(generator.standard_normal(shape, dtype=np.float32)).to(torch.bfloat16)
    sizes = magnitudes(weight)
    flat = np.ascontiguousarray(masks).reshape(-1)
    read_all(flat[:8192])
    counter = vote_counter(shape, voters)
    counter.count(masks)
    reading, counting = in_turn(partial(read_all, flat), partial(counter.count, masks))
    row(f"count {voters} masks of {shape[0]} x {shape[1]}", counting, reading, "read them")

    votes = [torch.from_numpy(unpack(mask, shape)) for mask in masks]

    def add() -> torch.Tensor:
        counts = torch.zeros(shape, dtype=torch.int32)
        for vote in votes:
            counts += vote
        return counts

    adding, counts = seconds(add, 2)
    require_equal(counter.counts(), counts, "counts")
    for group in ("layer", "row", "column"):
        counter.most_voted(0.5, group, sizes)
        selecting, found = seconds(partial(counter.most_voted, 0.5, group, sizes))
        require_equal(
            found, pack(select_most_voted(counter.counts(), 0.5, group, sizes)), f"votes by {group}"
        )
        if group == "layer":
            sorting, (_, order) = seconds(
                partial(torch.sort, counts.reshape(-1), descending=True, stable=True), 2
            )
            by_index = torch.zeros(counts.numel(), dtype=torch.bool)
            by_index[order[: counts.numel() // 2]] = True
            require_equal(
                counter.most_voted(0.5, "layer"),
                pack(by_index.numpy()),
                "votes by layer, ties by index",
            )
            row("select by layer, ties by magnitude", selecting, sorting, "torch.sort")
            row(
                "count and select by layer",
                counting + selecting,
                adding + sorting,
                "int32 += bool, torch.sort",
            )
            row("count and select by layer", counting + selecting, reading, "read them")
        else:
            sorting, by_index = seconds(partial(select_by_sorting, counts, group), 2)
            require_equal(
                counter.most_voted(0.5, group),
                pack(by_index.numpy()),
                f"votes by {group}, ties by index",
            )
            row(
                f"select by {group}, ties by magnitude",
                selecting,
                sorting,
                "stable sort, scatter (ties by index)",
            )


def select_by_sorting(counts: torch.Tensor, group: str) -> torch.Tensor:
    """Return the prune mask of the half of each row or column with most votes.

    The method is that of FedPrLLM's code; the mask has the shape of ``counts``.
    """
    dim = 1 if group == "row" else 0
    most_voted = torch.sort(-counts.float(), dim=dim, stable=True).indices.narrow(
        dim, 0, counts.shape[dim] // 2
    )
    return torch.zeros(counts.shape, dtype=torch.bool).scatter_(dim, most_voted, True)


def measure_masks(shape: tuple[int, int], generator: np.random.Generator) -> None:
    """Measure scoring and selecting, against a stable sort and a scatter."""
    weight = torch.from_numpy(generator.standard_normal(shape, dtype=np.float32))
    square_sum = torch.from_numpy(generator.random(shape[1]) * 9)
    worth = selection.WORTH_COMPILING
    measured: list[tuple[LocalMetric, str]] = [
        ("wanda", "row"),
        ("wanda", "layer"),
        ("wanda", "column"),
        ("wanda", "2:4"),
    ]
    measured += [
        ("ria", "row"),
        ("ria", "layer"),
        ("ria", "column"),
        ("ria", "2:4"),
        ("magnitude", "layer"),
    ]
    for metric, group in measured:
        local = LocalPruning(metric, 0.5, group)
        local.prune_mask(weight, square_sum)
        ours, found = seconds(partial(local.prune_mask, weight, square_sum))
        selection.WORTH_COMPILING = NEVER
        plain, expected = seconds(partial(local.prune_mask, weight, square_sum), 2)
        selection.WORTH_COMPILING = worth
        require_equal(found, expected, f"{metric} by {group}")
        row(f"{metric} mask by {group}", ours, plain, "stable sort, scatter")


def voted_masks(shape: tuple[int, int], voters: int, generator: np.random.Generator) -> np.ndarray:
    """Return packed masks that agree like those of clients: each weight has its own probability."""
    probability = torch.from_numpy(generator.beta(0.3, 0.3, shape).astype(np.float32))
    masks = stack_of_masks(voters, num_words(shape[0] * shape[1]))
    for mask in masks:
        mask[:] = pack(torch.bernoulli(probability).bool().numpy())
    return masks


def device_seconds(work: Callable[[], Any], times: int = 5) -> tuple[float, Any]:
    """Return ``seconds`` of work on the CUDA device, synchronization included."""

    def finished() -> Any:
        result = work()
        torch.cuda.synchronize()
        return result

    # The first call compiles the kernels.
    finished()
    return seconds(finished, times)


def measure_votes_on_device(
    shape: tuple[int, int], voters: int, generator: np.random.Generator
) -> None:
    """Measure counting and selecting votes on the device.

    Counting uses masks that are on the device already. Counting and selecting includes all
    transfers.
    """
    from pruning_kernels.votes.vote_planes_cuda import count_votes

    masks = voted_masks(shape, voters, generator)
    sizes = magnitudes(
        torch.from_numpy(generator.standard_normal(shape, dtype=np.float32)).to(torch.bfloat16)
    )
    host = vote_counter(shape, voters)
    ours = vote_counter(shape, voters, torch.device("cuda"))
    host.count(masks)
    on_device = torch.from_numpy(masks.view(np.int64)).cuda()
    planes = torch.empty((voters.bit_length(), masks.shape[1]), dtype=torch.int64, device="cuda")
    copying, _ = device_seconds(on_device.clone)
    counting, _ = device_seconds(partial(count_votes, on_device, planes))
    row(f"count {voters} masks of {shape[0]} x {shape[1]}", counting, copying, "copy them")

    moving, _ = device_seconds(lambda: torch.from_numpy(masks.view(np.int64)).cuda())
    for group in ("layer", "row", "column", "2:4"):

        def count_and_select(group: str = group) -> np.ndarray:
            ours.count(masks)
            return ours.most_voted(0.5, group, sizes)

        both, found = device_seconds(count_and_select, 3)
        require_equal(found, host.most_voted(0.5, group, sizes), f"votes by {group}")
        row(
            f"count and select by {group}, from the host and back",
            both,
            moving,
            "move them to the device",
        )
    require_equal(ours.counts(), host.counts(), "counts")


def measure_masks_on_device(shape: tuple[int, int], generator: np.random.Generator) -> None:
    """Measure Wanda's mask of a weight that is on the device."""
    weight = torch.from_numpy(generator.standard_normal(shape, dtype=np.float32))
    square_sum = torch.from_numpy(generator.random(shape[1]) * 9)
    weight_there = weight.cuda()
    square_sum_there = square_sum.cuda()
    copying, _ = device_seconds(weight_there.clone)
    for group in ("row", "layer", "column", "2:4"):
        local = LocalPruning("wanda", 0.5, group)
        ours, found = device_seconds(partial(local.prune_mask, weight_there, square_sum_there), 3)
        require_equal(found.cpu(), local.prune_mask(weight, square_sum), f"wanda by {group}")
        row(f"wanda mask by {group}", ours, copying, "copy the weight")


def main() -> None:
    """Run the measurements and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--columns", type=int, default=11008)
    parser.add_argument("--voters", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    given = parser.parse_args()
    if given.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("--device cuda: this machine has no CUDA device that torch can use")
    torch.set_num_threads(given.threads)
    shape = (given.rows, given.columns)
    generator = np.random.default_rng(0)
    where = f"{given.threads} threads" if given.device == "cpu" else torch.cuda.get_device_name()
    print(f"{where}, a matrix of {given.rows} x {given.columns}, equal bits in every line\n")
    print("| what | time | against | |\n|---|---|---|---|")
    votes, masks = (
        (measure_votes, measure_masks)
        if given.device == "cpu"
        else (measure_votes_on_device, measure_masks_on_device)
    )
    votes(shape, given.voters, generator)
    masks(shape, generator)


if __name__ == "__main__":
    main()
