"""Packed masks against integer arithmetic."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pruning_kernels.votes.bitmask import (
    count,
    has_clean_padding,
    num_words,
    pack,
    stack_of_masks,
    unpack,
)


def words_by_arithmetic(bits: list[bool]) -> list[int]:
    """Return the words of a flat mask: bit i % 64 of word i // 64, one bit at a time."""
    words = [0] * ((len(bits) + 63) // 64)
    for index, bit in enumerate(bits):
        words[index // 64] += int(bit) << (index % 64)
    return words


@pytest.mark.parametrize(
    ("weights", "words"), [(0, 0), (1, 1), (63, 1), (64, 1), (65, 2), (128, 2), (129, 3)]
)
def test_number_of_words(weights: int, words: int) -> None:
    assert num_words(weights) == words


def test_a_mask_on_paper() -> None:
    """Packing is row-major without padding between rows: bits 0, 2 and 3 make 1 + 4 + 8."""
    assert pack(np.array([[True, False, True], [True, False, False]])).tolist() == [13]


@settings(max_examples=80, deadline=None)
@given(st.lists(st.booleans(), min_size=1, max_size=300))
def test_packing_equals_arithmetic(bits: list[bool]) -> None:
    packed = pack(np.array(bits))
    assert packed.dtype == np.uint64
    assert packed.tolist() == words_by_arithmetic(bits)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 20), st.integers(1, 20), st.randoms(use_true_random=False))
def test_unpacking_inverts_packing(rows: int, columns: int, random: object) -> None:
    mask = [[random.random() < 0.5 for _ in range(columns)] for _ in range(rows)]  # type: ignore[attr-defined]
    found = unpack(
        np.array(words_by_arithmetic([bit for row in mask for bit in row]), dtype=np.uint64),
        (rows, columns),
    )
    assert found.dtype == np.bool_
    assert found.tolist() == mask
    assert unpack(pack(np.array(mask)), (rows, columns)).tolist() == mask


def test_transposed_mask_is_packed_row_major() -> None:
    mask = np.array([[True, True, False], [False, False, False]]).T
    assert pack(mask).tolist() == words_by_arithmetic([True, False, True, False, False, False])


def test_words_are_little_endian() -> None:
    bits = [False] * 64
    bits[9] = True
    assert pack(np.array(bits)).astype("<u8").tobytes() == bytes([0, 2, 0, 0, 0, 0, 0, 0])


@pytest.mark.parametrize("words", [0, 2])
def test_unpacking_refuses_other_word_counts(words: int) -> None:
    with pytest.raises(ValueError, match="a mask of 6 weights has 1 words"):
        unpack(np.zeros(words, dtype=np.uint64), (2, 3))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 2**64 - 1), max_size=6))
def test_count_equals_ones_in_binary_text(words: list[int]) -> None:
    assert count(np.array(words, dtype=np.uint64)) == sum(bin(word).count("1") for word in words)


@pytest.mark.parametrize("words", [1, 512, 513, 1 << 16])
def test_stack_rows_start_at_other_cache_places(words: int) -> None:
    """A cache has 64 places for lines of 64 bytes, and each of 64 rows begins at another place."""
    stack = stack_of_masks(64, words)
    assert stack.shape == (64, words)
    assert {row * stack.strides[0] // 64 % 64 for row in range(64)} == set(range(64))


@pytest.mark.parametrize("weights", [1, 5, 63, 64, 65, 100, 128])
def test_padding_is_clean_without_surplus_bits(weights: int) -> None:
    words = pack(np.ones(weights, dtype=np.bool_))
    assert has_clean_padding(words, weights)
    for bit in range(weights, num_words(weights) * 64):
        dirty = words.copy()
        dirty[-1] |= np.uint64(1 << (bit % 64))
        assert not has_clean_padding(dirty, weights)
