"""Noise and sampling: their distribution, their sources, and their grid."""

from collections import Counter

import pytest

from espalier.privacy.noise import SecureBits, SeededBits


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
