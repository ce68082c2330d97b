"""Emulated differential privacy of sums: vectors of samples are clipped, and noise is added.

The program itself has differential privacy of its own; this emulation shows what noise of a given
epsilon would leave of an attack. Its bound and scale come from reference text, which is public
here.
"""

import math

import torch
from torch import Tensor

DELTA = 1e-5


def gaussian_delta(noise: float, epsilon: float) -> float:
    """Return delta of the Gaussian mechanism with sensitivity 1 (Balle & Wang 2018, theorem 8)."""

    def normal(value: float) -> float:
        return math.erfc(-value / math.sqrt(2)) / 2

    half = 1 / (2 * noise)
    return normal(half - epsilon * noise) - math.exp(epsilon) * normal(-half - epsilon * noise)


def noise_for(epsilon: float, delta: float = DELTA) -> float:
    """Return the smallest standard deviation for sensitivity 1, to a relative accuracy of 1e-6."""
    low, high = 1e-3, 1e3
    while high / low > 1 + 1e-6:
        middle = math.sqrt(low * high)
        if gaussian_delta(middle, epsilon) > delta:
            low = middle
        else:
            high = middle
    return high


def clipped(vectors: Tensor, scale: Tensor, bound: float) -> Tensor:
    """Return vectors in units of ``scale``, scaled down to an L2 norm of at most ``bound``."""
    scaled = vectors / scale
    norms = scaled.norm(dim=-1, keepdim=True)
    return scaled * (bound / norms.clamp(min=1e-12)).clamp(max=1.0)


def private_means(
    vectors: Tensor, scale: Tensor, bound: float, epsilon: float, generator: torch.Generator
) -> Tensor:
    """Return means of clipped vectors with noise, (groups, numbers).

    Parameters
    ----------
    vectors : (groups, samples, numbers)
    scale : (numbers,), above 0
    bound : largest L2 norm of a sample's vector in units of ``scale``
    epsilon : of one sample added or removed, at ``DELTA``; infinity for no noise
    """
    sums = clipped(vectors, scale, bound).sum(dim=1)
    if math.isfinite(epsilon):
        noise = torch.randn(sums.shape, generator=generator, dtype=sums.dtype)
        sums = sums + noise_for(epsilon) * bound * noise
    return sums / vectors.shape[1]
