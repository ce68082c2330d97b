"""Kernels that find the most voted weights stay within their arrays.

They run as Python functions, in which NumPy checks the indices.
"""

from collections.abc import Iterator

import numpy as np
import pytest

from pruning_kernels.selection import lowest_scores
from pruning_kernels.votes import vote_selection, votes
from pruning_kernels.votes.bitmask import pack
from pruning_kernels.votes.votes import VoteCounter, select_most_voted

INSTRUCTIONS = {
    "popcount": lambda word: int(word).bit_count(),
    "lowest_bit": lambda word: np.uint64((int(word) & -int(word)).bit_length() - 1),
}


@pytest.fixture
def kernels_as_python(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Replace each kernel by the Python function it is compiled from, for matrices of any size."""
    for module in (lowest_scores, vote_selection):
        for name, found in list(vars(module).items()):
            if hasattr(found, "py_func"):
                monkeypatch.setattr(module, name, found.py_func)
            elif name in INSTRUCTIONS:
                monkeypatch.setattr(module, name, INSTRUCTIONS[name])
    monkeypatch.setattr(votes, "WORTH_COMPILING", 0)
    with np.errstate(over="ignore"):
        yield


@pytest.mark.usefixtures("kernels_as_python")
@pytest.mark.parametrize("shape", [(1, 1), (17, 1), (3, 70), (5, 64), (9, 13), (4, 512), (3, 515)])
@pytest.mark.parametrize("group", ["layer", "row", "column"])
@pytest.mark.parametrize("highest", [0, 2])
def test_most_voted_need_no_out_of_range_index(
    shape: tuple[int, int], group: str, highest: int
) -> None:
    generator = np.random.default_rng(sum(shape))
    counts = generator.integers(0, highest + 1, shape).astype(np.int32)
    counted = VoteCounter(shape, 3)
    for plane, words in enumerate(counted.planes):
        words[:] = pack(counts >> plane & 1 == 1)
    for sizes in (
        None,
        generator.integers(0, 3, shape, dtype=np.uint32),
        generator.integers(0, 9, shape, dtype=np.uint16),
    ):
        found = counted.most_voted(0.5, group, sizes)
        assert (found == pack(select_most_voted(counts, 0.5, group, sizes))).all()


@pytest.mark.parametrize("guess", [0, 1, 6, 7, 40, 62, 63])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.97])
def test_wrong_threshold_guess_is_corrected(
    monkeypatch: pytest.MonkeyPatch, guess: int, share: float
) -> None:
    counts = np.random.default_rng(guess).binomial(63, 0.2, (40, 50)).astype(np.int32)
    counted = VoteCounter(counts.shape, 63)
    for plane, words in enumerate(counted.planes):
        words[:] = pack(counts >> plane & 1 == 1)
    monkeypatch.setattr(votes, "WORTH_COMPILING", 0)
    monkeypatch.setattr(vote_selection, "_guess", lambda planes, share: guess)
    assert (
        counted.most_voted(share, "layer", None) == pack(select_most_voted(counts, share, "layer"))
    ).all()
