"""Random numbers of private runs: Gaussian noise, and the choice of records.

Noise is added on a grid. Every record's vector is cut down to multiples of the grid's step, so that
its norm does not grow, and sums of them are exact integers. The noise is a discrete Gaussian on the
same grid (``discrete_gaussian.py``), so every number of a message is an integer, and last bits of
floating-point numbers tell nothing (Mironov 2012, "On Significance of the Least Significant Bits
for Differential Privacy").

The accounting is that of the continuous Gaussian. Its Rényi moments bound those of the discrete one
(Canonne, Kamath and Steinke 2020, "The Discrete Gaussian for Differential Privacy", theorem 14).
The bound by privacy random variables holds for a continuous Gaussian that is rounded to the grid,
which is post-processing. With a deviation of at least 2^29 steps, which all noise has, also that of
one site which shares it, the probabilities of its integers are those of the discrete one up to a
factor of 1 +- 2^-65 within 12 deviations.

Covers: with ``SecureBits`` noise and sampling come from the operating system's generator, so that
nobody can compute them again, neither the server nor the site. With ``SeededBits`` everybody who
knows the run's seed can, and nothing is protected; it is for simulations whose runs must repeat.

Does not cover: other programs at the site that read this process's memory. The time that drawing
takes, which does not depend on data.
"""

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from espalier.privacy.discrete_gaussian import discrete_gaussian
from espalier.seeds import derive_seed
from pruning_kernels.fixed_point import RECORD_BITS

MAX_RECORDS = 1 << 21
"""Maximum number of records whose integers can be added in 64 bits, with noise."""

Integers = NDArray[np.int64]
"""Multiples of the grid's step, which is 2^-40 of the bound to which a record is clipped."""


class RandomBits(ABC):
    """Source of random bits, and what is drawn from them."""

    @abstractmethod
    def words(self, number: int) -> NDArray[np.uint64]:
        """Return uniform integers of 64 bits, (number,)."""

    def uniform(self, number: int) -> NDArray[np.float64]:
        """Return uniform numbers in [0, 1) with 53 bits, (number,)."""
        # The upper 53 bits, as many as a float64 has.
        return np.ldexp((self.words(number) >> np.uint64(11)).astype(np.float64), -53)

    def grid_noise(self, number: int, deviation: float) -> Integers:
        """Return discrete Gaussian noise, (number,).

        Parameters
        ----------
        deviation : standard deviation in units of the clipping bound
        """
        # The grid's step is 2^-40 of the bound.
        return discrete_gaussian(number, math.ldexp(deviation, RECORD_BITS), self.words)

    def sampled(self, number: int, rate: float) -> list[int]:
        """Return the records that take part, each of ``number`` with probability ``rate``."""
        # With rate 1 no randomness is used.
        if rate >= 1:
            return list(range(number))
        # Independent choices (Poisson sampling), which the accounting assumes.
        records: list[int] = np.flatnonzero(self.uniform(number) < rate).tolist()
        return records

    def chosen(self, places: Sequence[int], most: int) -> list[int]:
        """Return ``most`` of the places at random, in order; all if there are not more."""
        if len(places) <= most:
            return list(places)
        # Sorting random words gives a random subset; ties are practically impossible.
        order = np.argsort(self.words(len(places)), kind="stable")[:most]
        return [places[place] for place in sorted(order.tolist())]


class SecureBits(RandomBits):
    """Bits of the operating system's generator for cryptography (``os.urandom``)."""

    def words(self, number: int) -> NDArray[np.uint64]:
        """Return uniform integers of 64 bits, (number,)."""
        return np.frombuffer(os.urandom(8 * number), np.uint64)


class SeededBits(RandomBits):
    """Bits that follow from the run's seed, for simulations; they protect nothing."""

    def __init__(self, seed: int, client: int, server_round: int) -> None:
        derived_seed = derive_seed(seed, "privacy", client=client, server_round=server_round)
        self._generator = np.random.Generator(np.random.PCG64(derived_seed))

    def words(self, number: int) -> NDArray[np.uint64]:
        """Return uniform integers of 64 bits, (number,)."""
        return self._generator.integers(0, 1 << 64, number, np.uint64)
