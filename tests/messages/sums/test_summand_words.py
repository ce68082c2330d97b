"""Modular integers packed into words, compared with Python's integers."""

import numpy as np
import pytest

from espalier.messages.sums.summands import (
    SumSpec,
    add_to,
    bits_for,
    clear_padding,
    has_clean_padding,
    pack,
    unpack,
)
from espalier.messages.tensor_blobs import TensorSpec

ALL_BITS = [*range(1, 65), 128]


def drawn(spec: SumSpec, seed: int) -> np.ndarray:
    """Return random words as numbers of ``spec``, with the largest and the smallest among them."""
    generator = np.random.default_rng(seed)
    shape = (2, spec.length) if spec.bits == 128 else (spec.length,)
    numbers = generator.integers(0, 1 << 64, shape, np.uint64, endpoint=False)
    numbers[..., :2] = np.uint64(0)
    numbers[..., 2:6] = ~np.uint64(0)
    return numbers


def integers(numbers: np.ndarray, bits: int) -> list[int]:
    if bits == 128:
        return [int(low) + (int(high) << 64) for low, high in numbers.T]
    return [int(number) % (1 << bits) for number in numbers]


def test_bits_of_numbers_by_hand() -> None:
    # Three numbers of 30 bits: the third lies in both words.
    spec = SumSpec(3, 30)
    words = pack(np.array([1, 2, 0b110_101], np.uint64), spec)
    assert words.tolist() == [1 | 2 << 30 | 0b0101 << 60, 0b11]
    assert spec.num_words == 2
    assert spec.tensor == TensorSpec("U64", (2,))
    wide = pack(np.array([[1, 2], [3, 4]], np.uint64), SumSpec(2, 128))
    assert wide.tolist() == [1, 3, 2, 4]


@pytest.mark.parametrize("bits", ALL_BITS)
def test_words_hold_the_numbers_without_gaps(bits: int) -> None:
    for length in (0, 1, 7, 64, 131):
        spec = SumSpec(length, bits)
        numbers = drawn(spec, bits)
        words = pack(numbers, spec)
        whole = sum(number << bits * i for i, number in enumerate(integers(numbers, bits)))
        assert sum(int(word) << 64 * i for i, word in enumerate(words)) == whole
        assert integers(unpack(words, spec), bits) == integers(numbers, bits)


@pytest.mark.parametrize("bits", ALL_BITS)
def test_sums_and_differences_are_modular(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from espalier.messages.sums import summands

    # Several chunks.
    monkeypatch.setattr(summands, "CHUNK_WORDS", 64)
    summands._top_bits.cache_clear()
    spec = SumSpec(333, bits)
    first = drawn(spec, 1)
    second = np.roll(drawn(spec, 2), 3, axis=-1)
    total = pack(first, spec)
    add_to(total, pack(second, spec), spec)
    pairs = list(zip(integers(first, bits), integers(second, bits), strict=True))
    assert integers(unpack(total, spec), bits) == [(a + b) % (1 << bits) for a, b in pairs]
    assert has_clean_padding(total, spec)
    left = pack(first, spec)
    add_to(left, pack(second, spec), spec, subtracts=True)
    assert integers(unpack(left, spec), bits) == [(a - b) % (1 << bits) for a, b in pairs]
    assert has_clean_padding(left, spec)
    add_to(total, pack(second, spec), spec, subtracts=True)
    assert total.tolist() == pack(first, spec).tolist()
    summands._top_bits.cache_clear()


def test_padding() -> None:
    spec = SumSpec(3, 5)
    words = np.array([~np.uint64(0)])
    assert not has_clean_padding(words, spec)
    clear_padding(words, spec)
    assert words.tolist() == [(1 << 15) - 1]
    assert has_clean_padding(words, spec)
    full = np.full(4, ~np.uint64(0))
    assert has_clean_padding(full, SumSpec(2, 128))
    assert has_clean_padding(full, SumSpec(64, 4))


def test_bits_of_votes() -> None:
    assert [bits_for(clients) for clients in (1, 2, 3, 4, 7, 8, 32, 100)] == [
        1, 2, 2, 3, 3, 4, 6, 7
    ]  # fmt: skip


def test_wrong_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="no vector"):
        SumSpec(3, 65)
    with pytest.raises(ValueError, match="not the shape"):
        pack(np.zeros(4, np.uint64), SumSpec(3, 8))
    with pytest.raises(ValueError, match="words"):
        unpack(np.zeros(2, np.uint64), SumSpec(3, 8))
