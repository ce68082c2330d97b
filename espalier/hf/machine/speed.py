"""Compute speed of a site: matrix products on its device, with its number of threads."""

import time
from functools import cache

import torch

from espalier.hf.machine.computing import Computing

SIZE = 1024
REPEATS = 5
GIGA = 1e9


def measured_capability(computing: Computing) -> float:
    """Return the speed in billions of multiplications and additions per second.

    The result is the best of five measurements, rounded to two significant digits. Measurements
    differ from time to time, and so do layer samples that depend on them. A run that must be
    reproducible states its capabilities in the settings.
    """
    matrix = torch.ones(SIZE, SIZE, device=computing.device, dtype=computing.dtype)
    # The shortest time is least disturbed by other processes.
    best = min(_seconds(matrix) for _ in range(REPEATS))
    return float(f"{2 * SIZE**3 / best / GIGA:.1e}")


@cache
def capability_of_this_process(computing: Computing) -> float:
    """Return ``measured_capability``, measured once per process."""
    return measured_capability(computing)


def _seconds(matrix: torch.Tensor) -> float:
    started = time.perf_counter()
    # item() waits for the result, because a CUDA device computes asynchronously.
    (matrix @ matrix).sum().item()
    return time.perf_counter() - started
