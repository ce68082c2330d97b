"""How much a site can compute: the speed of matrix products on the device and with the threads that it would work with."""

import time
from functools import cache

import torch

from espalier.hf.machine.computing import Computing

SIZE = 1024
REPEATS = 5
GIGA = 1e9


def measured_capability(computing: Computing) -> float:
    """Billions of multiplications and additions per second, best of five, to two significant digits.

    What is measured differs from one time to the next, and so then do the samples of layers; a run that shall repeat states
    its capabilities.
    """
    matrix = torch.ones(SIZE, SIZE, device=computing.device, dtype=computing.dtype)
    best = min(_seconds(matrix) for _ in range(REPEATS))
    return float(f"{2 * SIZE**3 / best / GIGA:.1e}")


@cache
def capability_of_this_process(computing: Computing) -> float:
    """Return ``measured_capability``, measured once in a process."""
    return measured_capability(computing)


def _seconds(matrix: torch.Tensor) -> float:
    started = time.perf_counter()
    (matrix @ matrix).sum().item()  # to the end, also where the device works on its own
    return time.perf_counter() - started
