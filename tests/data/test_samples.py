"""Calibration samples: never overlapping, never padded, hashed."""

import hashlib
import struct
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from espalier.data.samples import calibration_samples, evaluation_samples, samples_sha256
from espalier.errors import EspalierError

SECRET = "Anna K., born 1961"


def numbered(text: str) -> list[int]:
    """Encode the text "7" as the tokens 0 to 6, so that each token is its own position."""
    return list(range(int(text)))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 200), st.integers(1, 9), st.integers(1, 6), st.integers(0, 2**62))
def test_calibration_windows_do_not_overlap(
    tokens: int, length: int, number: int, seed: int
) -> None:
    if tokens // length < number:
        return
    samples = calibration_samples([str(tokens)], numbered, number, length, seed).tolist()
    assert len(samples) == number
    for sample in samples:
        assert sample == list(range(sample[0], sample[0] + length))
    starts = sorted(sample[0] for sample in samples)
    assert all(later - earlier >= length for earlier, later in pairwise(starts))
    assert 0 <= starts[0] <= starts[-1] <= tokens - length


def test_the_seed_alone_decides() -> None:
    torch.manual_seed(1)
    first = calibration_samples(["500"], numbered, 5, 7, 42)
    torch.manual_seed(2)
    assert torch.equal(calibration_samples(["500"], numbered, 5, 7, 42), first)
    assert not torch.equal(calibration_samples(["500"], numbered, 5, 7, 43), first)


def test_every_token_can_be_drawn() -> None:
    """Covers the last tokens, which samples at multiples of their length would never reach."""
    drawn = {
        token
        for seed in range(60)
        for token in calibration_samples(["10"], numbered, 1, 4, seed).flatten().tolist()
    }
    assert drawn == set(range(10))


def test_drawing_leaves_global_rng_unchanged() -> None:
    before = torch.random.get_rng_state()
    calibration_samples(["100"], numbered, 2, 5, 0)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_passages_are_joined_by_a_blank_line() -> None:
    samples = calibration_samples(["ab", "cd"], lambda text: list(text.encode()), 1, 6, 0)
    assert bytes(samples[0].tolist()) == b"ab\n\ncd"


@pytest.mark.parametrize("passages", [[], [SECRET]])
def test_too_little_text_is_told_in_numbers(
    passages: list[str],
) -> None:
    with pytest.raises(
        EspalierError, match=r"gives \d samples of 7 tokens, but data.num-samples = 9 are needed"
    ) as caught:
        calibration_samples(passages, lambda text: list(text.encode()), 9, 7, 0)
    assert "Anna" not in str(caught.value)


@pytest.mark.parametrize(
    ("tokens", "length", "most", "starts"),
    [
        (10, 3, 0, [0, 3, 6]),
        (10, 3, 5, [0, 3, 6]),
        (10, 3, 3, [0, 3, 6]),
        (10, 3, 2, [0, 3]),
        (24, 3, 4, [0, 6, 12, 18]),
        (30, 3, 4, [0, 6, 12, 18]),
        (24, 3, 1, [0]),
    ],
)
def test_evaluation_windows_on_paper(
    tokens: int, length: int, most: int, starts: list[int]
) -> None:
    samples = evaluation_samples(str(tokens), numbered, length, most, "wiki")
    assert samples.dtype == torch.int64
    assert samples.tolist() == [list(range(start, start + length)) for start in starts]


def test_a_text_shorter_than_a_window_is_named() -> None:
    with pytest.raises(
        EspalierError, match=r"'wiki' has fewer than evaluation.sequence-length = 5 tokens"
    ):
        evaluation_samples("4", numbered, 5, 0, "evaluation.texts: 'wiki'")


def test_hash_is_of_little_endian_int64_token_ids() -> None:
    expected = hashlib.sha256(struct.pack("<6q", 1, 2, 3, 4, 5, 600)).hexdigest()
    samples = torch.tensor([[1, 2, 3], [4, 5, 600]])
    assert samples_sha256(samples) == expected
    assert samples_sha256(torch.tensor([[1, 4], [2, 5], [3, 600]]).T) == expected


def test_short_text_error_mentions_duplicates() -> None:
    """A long file that repeats one passage holds little text."""
    with pytest.raises(
        EspalierError,
        match="duplicate passages count once, and one passage in ten is held out; give the",
    ) as caught:
        calibration_samples(["oak"], lambda text: list(text.encode()), 2, 8, 0)
    assert "duplicate passages count once" in caught.value.outward
