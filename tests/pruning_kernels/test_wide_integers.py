"""Integers of 128 bits: same sums as words in fixed point, compared with Python's integers."""

import numpy as np
import torch

from espalier.messages.sums.summands import SumSpec, add_to, pack, unpack
from pruning_kernels.fixed_point import from_words, summed, to_words
from pruning_kernels.wide_integers import from_wide, to_wide

BITS = 40
NUMBERS = torch.tensor(
    [0.0, 1.0, -1.0, 1e-9, -1e-9, 2.0**54, -(2.0**54), 3.7e12, -0.3333], dtype=torch.float64
)


def integers(wide: np.ndarray) -> list[int]:
    found = [int(low) + (int(high) << 64) for low, high in wide.T]
    return [number - (1 << 128) if number >> 127 else number for number in found]


def test_wide_integers_are_the_scaled_numbers() -> None:
    expected = [round(number * 2**BITS) for number in NUMBERS.tolist()]
    words = to_words(NUMBERS, BITS)
    assert integers(to_wide(words)) == expected
    assert from_words(from_wide(to_wide(words)), BITS).tolist() == (
        from_words(words, BITS).tolist()
    )


def test_sums_are_those_of_words() -> None:
    generator = torch.Generator().manual_seed(0)
    parties = [
        to_words((torch.rand(500, generator=generator, dtype=torch.float64) - 0.5) * 2**55, BITS)
        for _ in range(9)
    ]
    spec = SumSpec(500, 128)
    total = np.zeros(spec.num_words, np.uint64)
    for words in parties:
        add_to(total, pack(to_wide(words), spec), spec)
    words = from_wide(unpack(total, spec))
    assert torch.equal(from_words(words, BITS), from_words(summed(parties), BITS))
    assert integers(unpack(total, spec)) == [
        sum(column) for column in zip(*(integers(to_wide(one)) for one in parties), strict=True)
    ]
    # Words of a sum show no carries of single parties.
    assert (words[0] >> np.uint64(48) == 0).all()
