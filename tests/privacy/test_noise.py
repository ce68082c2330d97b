"""Noise and sampling: their distribution, their sources, and their grid."""

from collections import Counter
from statistics import NormalDist

import numpy as np
import pytest
from numpy.typing import NDArray

from espalier.privacy.noise import RandomBits, SecureBits, SeededBits
from pruning_kernels.fixed_point import RECORD_BITS

pytest.importorskip("scipy", reason="needs the extra privacy")


class Given(RandomBits):
    """Source with given words."""

    def __init__(self, *words: int) -> None:
        self._words = np.array(words, np.uint64)

    def words(self, number: int) -> NDArray[np.uint64]:
        found, self._words = self._words[:number], self._words[number:]
        assert len(found) == number
        return found


def test_gaussian_is_the_inverse_of_the_distribution_function() -> None:
    """The lowest bit is the sign, the others are the probability of what lies further out."""
    quarter = 1 << 63
    found = Given(quarter, quarter + 1, 0, (1 << 64) - 1).gaussian(4)
    expected = -NormalDist().inv_cdf(0.25)
    np.testing.assert_allclose(found[:2], [-expected, expected], rtol=1e-9)
    assert -9.3 < found[2] < -9.1
    assert abs(found[3]) < 1e-15


@pytest.mark.parametrize("bits", [SecureBits(), SeededBits(1, 0, 1)], ids=["secure", "seed"])
def test_gaussian_has_the_moments_and_tails_of_the_normal_distribution(bits: RandomBits) -> None:
    """A right sampler fails here with a probability below 1e-8."""
    number = 200_000
    found = bits.gaussian(number)
    tolerance = 6 / number**0.5
    assert abs(found.mean()) < tolerance
    assert abs(found.var() - 1) < tolerance * 2**0.5
    assert abs((found**4).mean() - 3) < tolerance * 96**0.5
    for limit in (0.5, 1.0, 2.0, 3.0):
        expected = 2 * NormalDist().cdf(-limit)
        share = (np.abs(found) > limit).mean()
        assert abs(share - expected) < tolerance * (expected * (1 - expected)) ** 0.5


def test_grid_noise_is_the_rounded_noise() -> None:
    noise = SeededBits(3, 1, 2).grid_noise(1000, 2.5)
    expected = SeededBits(3, 1, 2).gaussian(1000) * 2.5 * 2.0**RECORD_BITS
    assert noise.dtype == np.int64
    assert np.abs(noise - expected).max() <= 0.5


def test_secure_noise_never_repeats() -> None:
    one, other = (SecureBits().words(64) for _ in range(2))
    assert not set(one.tolist()) & set(other.tolist())


def test_secure_bits_come_from_the_operating_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.urandom", lambda number: bytes(range(number)))
    assert SecureBits().words(2).tobytes() == bytes(range(16))


def test_seeded_noise_differs_between_clients_and_rounds() -> None:
    found = {
        SeededBits(seed, client, place).words(1)[0]
        for seed in range(3)
        for client in range(3)
        for place in range(3)
    }
    assert len(found) == 27
    assert SeededBits(1, 2, 3).words(5).tolist() == SeededBits(1, 2, 3).words(5).tolist()


def test_each_record_takes_part_by_itself() -> None:
    bits = SeededBits(0, 0, 0)
    counts = Counter(number for _ in range(2000) for number in bits.sampled(5, 0.3))
    sizes = [len(SeededBits(seed, 0, 0).sampled(5, 0.3)) for seed in range(300)]
    assert all(abs(counts[number] / 2000 - 0.3) < 0.06 for number in range(5))
    assert {0, 1, 2, 3} <= set(sizes)
    assert bits.sampled(4, 1.0) == [0, 1, 2, 3]


def test_sequences_of_a_record_are_chosen_at_random() -> None:
    bits = SeededBits(0, 0, 0)
    assert bits.chosen([7, 9], 2) == [7, 9]
    found = Counter(tuple(bits.chosen(range(3), 2)) for _ in range(300))
    assert set(found) == {(0, 1), (0, 2), (1, 2)}
    assert min(found.values()) > 60
