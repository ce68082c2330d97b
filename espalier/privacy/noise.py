"""Random numbers of private runs: Gaussian noise, and the choice of records.

Noise is added on a grid. Every record's vector is cut down to multiples of the grid's step, so that
its norm does not grow, and sums of them are exact integers. Gaussian noise is then rounded to the
grid. Since the sum is an integer, this is the same as rounding a sum with continuous noise, so the
accounting of the continuous mechanism holds, and the last bits of floating-point numbers tell
nothing (Mironov 2012, "On Significance of the Least Significant Bits for Differential Privacy").

Covers: with ``SecureBits`` noise and sampling come from the operating system's generator, so that
nobody can compute them again, neither the server nor the site. With ``SeededBits`` everybody who
knows the run's seed can, and nothing is protected; it is for simulations whose runs must repeat.

Does not cover: other programs at the site that read this process's memory. A Gaussian of float64
has no values beyond 9.2 standard deviations, which has a probability below 1e-19 for each number.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

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
        return np.ldexp((self.words(number) >> np.uint64(11)).astype(np.float64), -53)

    def gaussian(self, number: int) -> NDArray[np.float64]:
        """Return numbers of the standard normal distribution, (number,).

        One bit is the sign, and 63 bits are the probability of a value that is further out.
        """
        # scipy comes with Opacus, and only private runs need it.
        from scipy.special import ndtri

        words = self.words(number)
        tail = np.ldexp((words >> np.uint64(1)).astype(np.float64) + 0.5, -64)
        sizes = -ndtri(np.minimum(tail, 0.5))
        return np.where(words & np.uint64(1), sizes, -sizes)

    def grid_noise(self, number: int, deviation: float) -> Integers:
        """Return Gaussian noise as integers; ``deviation`` is in units of the clipping bound."""
        return np.rint(self.gaussian(number) * np.ldexp(deviation, RECORD_BITS)).astype(np.int64)

    def sampled(self, number: int, rate: float) -> list[int]:
        """Return the records that take part, each of ``number`` with probability ``rate``."""
        if rate >= 1:
            return list(range(number))
        found: list[int] = np.flatnonzero(self.uniform(number) < rate).tolist()
        return found

    def chosen(self, places: Sequence[int], most: int) -> list[int]:
        """Return ``most`` of the places at random, in order; all if there are not more."""
        if len(places) <= most:
            return list(places)
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
        own = derive_seed(seed, "privacy", client=client, server_round=server_round)
        self._generator = np.random.Generator(np.random.PCG64(own))

    def words(self, number: int) -> NDArray[np.uint64]:
        """Return uniform integers of 64 bits, (number,)."""
        return self._generator.integers(0, 1 << 64, number, np.uint64)
