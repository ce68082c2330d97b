"""Bounded numbers in fixed point, as integers modulo 2^bits that can be added in any order.

``fixed_point`` has two words for each number, for statistics of unknown size. Here a number has a
bound, so that fewer bits suffice: those of the bound in units of the last place, of the largest
weight, of the number of parties, and a sign.

Rounding: each party's weighted number is rounded once, to the nearest integer (ties to even). So
the sum over n parties is wrong by at most ``n / 2`` units, and a mean by at most ``n / 2`` units
divided by the sum of the weights. Range: a number beyond the bound is clipped to it, so that one
party contributes at most its weight times the bound, and no sum overflows.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

WORD_BITS = 64
"""Maximum number of bits of an integer."""


@dataclass(frozen=True)
class Scale:
    """Fixed point of numbers of magnitude up to ``2^exponent``, in units ``2^-fraction_bits``."""

    exponent: int
    fraction_bits: int

    @property
    def bound(self) -> float:
        """Largest magnitude of a party's number."""
        return 2.0**self.exponent

    def integers(self, numbers: NDArray[np.floating], weight: int = 1) -> NDArray[np.uint64]:
        """Return clipped numbers times a weight, flat, in two's complement modulo 2^64.

        ``numbers`` have any floating dtype and any shape.

        Raises
        ------
        OverflowError
            If a number is NaN.
        """
        values = numbers.reshape(-1).astype(np.float64)
        if np.isnan(values).any():
            raise OverflowError("a number is not a number (NaN)")
        # Clip before the weight: an infinite number contributes at most its weight times the bound.
        clipped = np.clip(values, -self.bound, self.bound)
        scaled = np.ldexp(clipped * weight, self.fraction_bits)
        return np.rint(scaled).astype(np.int64).view(np.uint64)

    def numbers(self, total: NDArray[np.uint64], bits: int) -> "Tensor":
        """Return a sum modulo ``2^bits`` as numbers, flat, float64."""
        # A client makes integers in a process that may have no torch.
        import torch

        # Move the sign to the top bit, and back with an arithmetic shift.
        unused = WORD_BITS - bits
        signed = (total << np.uint64(unused)).view(np.int64) >> np.int64(unused)
        return torch.from_numpy(np.ldexp(signed.astype(np.float64), -self.fraction_bits))

    def mean(self, total: NDArray[np.uint64], bits: int, weight: int) -> "Tensor":
        """Return a sum modulo ``2^bits`` divided by the sum of the weights, flat, float64.

        A mean beyond the bound, which no honest parties have, is clipped to it.
        """
        return (self.numbers(total, bits) / weight).clamp(-self.bound, self.bound)


def signed_bits(whole_bits: int, parties: int, max_weight: int = 1) -> int:
    """Return the fewest bits of a sum over ``parties`` of weighted numbers, with a sign.

    Parameters
    ----------
    whole_bits : bits of a number without its sign, ``exponent + fraction_bits`` of its scale
    max_weight : largest weight of a party
    """
    # A sum lies between minus and plus ``parties * max_weight * 2^whole_bits``; one bit is the
    # sign.
    return ((parties * max_weight) << whole_bits).bit_length() + 1


def fraction_that_fits(exponent: int, parties: int, max_weight: int, most: int) -> int:
    """Return the fraction bits, at most ``most``, with which a signed sum fits in 64 bits."""
    return min(most, WORD_BITS - signed_bits(exponent, parties, max_weight))
