"""Cost of averaging LoRA updates with and without the dense matrix, as a Markdown table.

    python benchmarks/speed/factors.py [--rows 4096] [--columns 11008] [--clients 64] [--rank 16]
    [--exact-share 4] [--threads 2]

Clients have float32 factors with a common part and a private part of equal size. Our code computes
the best mean of a given rank in float64. The plain code adds the dense updates in float32 and
truncates their SVD. As that takes minutes for a large matrix, the large case measures the sum only,
and the sum with ``torch.svd_lowrank``, which is approximate. The exact SVD is measured with rows,
columns and clients divided by ``--exact-share``; an error other than the Eckart-Young bound ends
the run.
"""

import argparse
import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pruning_kernels.lora.factor_means import weighted_mean
from pruning_kernels.lora.factors import Factors

AS_GOOD = 1e-6
"""Maximum difference between relative errors that float32 rounding explains."""


def seconds(work: Callable[[], Any], times: int) -> tuple[float, Any]:
    """Return the shortest of several times in seconds, and the result."""
    best = float("inf")
    result = None
    for _ in range(times):
        started = time.perf_counter()
        result = work()
        best = min(best, time.perf_counter() - started)
    return best, result


def drawn_clients(
    shape: tuple[int, int], number: int, rank: int, generator: torch.Generator
) -> list[Factors]:
    """Return updates with a common part and a private part of equal size."""

    def factor(*size: int) -> Tensor:
        return torch.randn(size, generator=generator)

    b = factor(shape[0], rank)
    a = factor(rank, shape[1])
    return [
        Factors(b + factor(shape[0], rank), a + factor(rank, shape[1]), 2.0) for _ in range(number)
    ]


def dense_sum(clients: list[Factors]) -> Tensor:
    """Return the mean of the dense updates in float32."""
    total = torch.zeros(clients[0].shape)
    for client in clients:
        total.addmm_(client.b, client.a, alpha=client.scaling / len(clients))
    return total


def truncated(matrix: Tensor, rank: int) -> Tensor:
    """Return the truncated exact SVD as a dense matrix."""
    u, values, vh = torch.linalg.svd(matrix, full_matrices=False)
    return u[:, :rank] * values[:rank] @ vh[:rank]


def truncated_at_random(clients: list[Factors], rank: int) -> Tensor:
    """Return the dense sum truncated by ``torch.svd_lowrank``.

    That function draws from torch's global generator, which is seeded here.
    """
    torch.manual_seed(0)
    u, values, v = torch.svd_lowrank(dense_sum(clients), q=rank)
    return u * values @ v.T


def relative_error(found: Tensor, mean: Tensor) -> float:
    """Return the distance from the mean relative to the norm of the mean."""
    return float((found.double() - mean).norm() / mean.double().norm())


def row(what: str, ours: float, plain: float, name: str) -> None:
    """Print a line of the table."""
    ratio = (
        f"{plain / ours:.1f} times faster"
        if plain > 1.2 * ours
        else f"{ours / plain:.2f} times its time"
    )
    print(f"| {what} | {ours:.2f} s | {name}: {plain:.2f} s | {ratio} |", flush=True)


def measure(clients: list[Factors], rank: int, times: int) -> str:
    """Compare with the dense sum, and with its approximate truncation."""
    rows, columns = clients[0].shape
    what = f"{len(clients)} updates of {rows} x {columns}, rank {clients[0].rank}"
    ours, found = seconds(partial(weighted_mean, clients, [1.0] * len(clients), rank, 2.0), times)
    adding, mean = seconds(partial(dense_sum, clients), times)
    row(what, ours, adding, "the dense sum alone")
    lowrank, approximate = seconds(partial(truncated_at_random, clients, rank), times)
    row(what, ours, lowrank, "the dense sum, torch.svd_lowrank")
    errors = [relative_error(dense_sum([found]), mean), relative_error(approximate, mean)]
    return (
        f"{what}: relative error of the mean {errors[0]:.6f}, with torch.svd_lowrank"
        f" {errors[1]:.6f}"
    )


def measure_exact(clients: list[Factors], rank: int, times: int) -> str:
    """Compare with the dense sum and its exact SVD, which must have the same error."""
    rows, columns = clients[0].shape
    what = f"{len(clients)} updates of {rows} x {columns}, rank {clients[0].rank}"
    ours, found = seconds(partial(weighted_mean, clients, [1.0] * len(clients), rank, 2.0), times)
    plain, expected = seconds(lambda: truncated(dense_sum(clients), rank), times)
    row(what, ours, plain, "the dense sum, torch.linalg.svd")
    mean = dense_sum(clients)
    values = torch.linalg.svdvals(mean.double())
    best = math.sqrt(float(values[rank:].square().sum() / values.square().sum()))
    errors = [relative_error(dense_sum([found]), mean), relative_error(expected, mean)]
    if max(abs(error - best) for error in errors) > AS_GOOD:
        raise SystemExit(f"{what}: relative errors {errors}, Eckart and Young's is {best}")
    return (
        f"{what}: relative error of the mean {errors[0]:.6f}, with torch.linalg.svd"
        f" {errors[1]:.6f}, the least {best:.6f}"
    )


def main() -> None:
    """Run the measurements and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--columns", type=int, default=11008)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--exact-share", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--times", type=int, default=3)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    generator = torch.Generator().manual_seed(0)
    share = given.exact_share
    print(f"{given.threads} threads, best mean of rank {given.rank}\n")
    print("| what | time | against | |\n|---|---|---|---|")
    clients = drawn_clients((given.rows, given.columns), given.clients, given.rank, generator)
    lines = [measure(clients, given.rank, given.times)]
    clients = drawn_clients(
        (given.rows // share, given.columns // share), given.clients // share, given.rank, generator
    )
    lines.append(measure_exact(clients, given.rank, given.times))
    print("\n" + "\n".join(f"- {line}" for line in lines))


if __name__ == "__main__":
    main()
