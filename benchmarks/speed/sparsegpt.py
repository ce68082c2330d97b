"""Speed of SparseGPT relative to its matrix products and the published loop, as Markdown.

    python benchmarks/speed/sparsegpt.py [--rows 4096] [--columns 4096] [--sparsity 0.5]
    [--threads 2] [--times 3]

All measurements are in one run on one matrix, each the best of several repetitions after the
kernels were compiled. The plain code is the published one: three steps to the factor; a threshold
from a sorted block; then column by column over all rows; after each block one product with all
columns on its right. It prunes below the threshold here, not up to it, so that it prunes as many
weights as ours. Results differ by rounding; if rounding reverses a comparison, the rest of the row
differs too. The output states the fraction of equal mask bits and the distance of the weights.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pruning_kernels.sparsegpt import factorise, prune

BLOCK = 128


def seconds(work: Callable[[], Any], times: int) -> tuple[float, Any]:
    """Return the shortest of several times in seconds, and the result."""
    best = float("inf")
    result = None
    for _ in range(times):
        started = time.perf_counter()
        result = work()
        best = min(best, time.perf_counter() - started)
    return best, result


def published_factor(gram: Tensor) -> Tensor:
    """Return the factor of the inverse, computed from the inverse as in the published code."""
    damped = gram.clone()
    damped.diagonal().add_(0.01 * gram.diagonal().mean())
    return torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(damped)), upper=True)


def published_loop(
    weight: Tensor, upper: Tensor, sparsity: float, pattern: tuple[int, int] | None
) -> tuple[Tensor, Tensor]:
    """Return prune mask and weights of the published loop, column by column."""
    updated = weight.clone()
    prune_mask = torch.zeros(weight.shape, dtype=torch.bool)
    for start in range(0, weight.shape[1], BLOCK):
        end = min(start + BLOCK, weight.shape[1])
        block = updated[:, start:end].clone()
        chosen = prune_mask[:, start:end]
        factor = upper[start:end, start:end]
        errors = torch.zeros_like(block)
        if pattern is None:
            scores = block.square() / factor.diagonal().square()
            chosen.copy_(scores < scores.flatten().sort().values[int(scores.numel() * sparsity)])
        for column in range(end - start):
            if pattern is not None and column % pattern[1] == 0:
                group = slice(column, column + pattern[1])
                scores = block[:, group].square() / factor.diagonal()[group].square()
                chosen[:, group].scatter_(
                    1, scores.topk(pattern[1] - pattern[0], dim=1, largest=False).indices, True
                )
            kept = torch.where(chosen[:, column], 0, block[:, column])
            error = (block[:, column] - kept) / factor[column, column]
            block[:, column:] -= error[:, None] @ factor[None, column, column:]
            block[:, column] = kept
            errors[:, column] = error
        updated[:, start:end] = block
        updated[:, end:] -= errors @ upper[start:end, end:]
    return prune_mask, updated


def trailing_products(updated: Tensor, errors: Tensor, upper: Tensor) -> None:
    """Compute only the products of the published loop."""
    for end in range(BLOCK, updated.shape[1], BLOCK):
        updated[:, end:].addmm_(
            errors[:, end - BLOCK : end], upper[end - BLOCK : end, end:], alpha=-1
        )


def halved_products(updated: Tensor, errors: Tensor, upper: Tensor) -> None:
    """Compute only our products: equally many multiplications, in fewer and larger products."""
    for number, end in enumerate(range(BLOCK, updated.shape[1], BLOCK), 1):
        width = (number & -number) * BLOCK
        right = updated[:, end : end + width]
        right.addmm_(
            errors[:, end - width : end], upper[end - width : end, end : end + width], alpha=-1
        )


def row(what: str, ours: float, plain: float, name: str) -> None:
    """Print a line of the table."""
    ratio = (
        f"{plain / ours:.1f} times faster"
        if plain > 1.2 * ours
        else f"{ours / plain:.2f} times its time"
    )
    print(f"| {what} | {ours:.3f} s | {name}: {plain:.3f} s | {ratio} |", flush=True)


def measure(weight: Tensor, gram: Tensor, sparsity: float, times: int) -> list[str]:
    """Print the table, and return lines on the differences of the results."""
    ours, factor = seconds(partial(factorise, gram), times)
    plain, upper = seconds(partial(published_factor, gram), times)
    row("factorise", ours, plain, "by way of the inverse")
    distance = float((factor.upper - upper).norm() / upper.norm())
    lines = [f"factor: relative distance {distance:.1e}"]
    floors = []
    for products, name in (
        (trailing_products, "the published products alone"),
        (halved_products, "our products alone"),
    ):
        updated = weight.clone()
        errors = torch.full_like(weight, 1e-3)
        floors.append((seconds(partial(products, updated, errors, factor.upper), times)[0], name))
    for pattern in (None, (2, 4)):
        what = f"prune {sparsity:.0%}" if pattern is None else "prune 2:4"
        prune(weight, factor, sparsity, pattern)
        ours, (prune_mask, found) = seconds(
            partial(prune, weight, factor, sparsity, pattern), times
        )
        plain, (expected_mask, expected) = seconds(
            partial(published_loop, weight, factor.upper, sparsity, pattern), 1
        )
        row(what, ours, plain, "the published loop")
        for floor, name in floors:
            row(what, ours, floor, name)
        agreement = float((prune_mask == expected_mask).double().mean())
        distance = float((found - expected).norm() / found.norm())
        costs = [
            float(((new - weight) @ gram * (new - weight)).double().sum())
            for new in (found, expected)
        ]
        lines.append(
            f"{what}: {agreement:.6%} of the mask agrees, relative distance of the weights"
            f" {distance:.1e}, squared error of the outputs {costs[0] / costs[1]:.6f} of the"
            " published loop's"
        )
    return lines


def main() -> None:
    """Run the measurements and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--columns", type=int, default=4096)
    parser.add_argument("--sparsity", type=float, default=0.5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--times", type=int, default=3)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(given.rows, given.columns, generator=generator) * 0.02
    mixing = (
        torch.eye(given.columns)
        + torch.randn(given.columns, given.columns, generator=generator) / given.columns**0.5
    )
    inputs = torch.randn(2 * given.columns, given.columns, generator=generator) @ mixing
    print(f"{given.threads} threads, a matrix of {given.rows} x {given.columns}\n")
    print("| what | time | against | |\n|---|---|---|---|")
    lines = measure(weight, inputs.T @ inputs, given.sparsity, given.times)
    print("\n" + "\n".join(f"- {line}" for line in lines))


if __name__ == "__main__":
    main()
