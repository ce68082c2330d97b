"""Plain references of the benchmarks: votes counted by hand, and blobs that arrive unchanged."""

import hashlib
from pathlib import Path

import numpy as np
import pytest

from benchmarks.speed.plain_stream import receive
from benchmarks.speed.plain_vote import plain_vote, unpacked


def test_votes_then_magnitude_then_index_decide() -> None:
    weight = np.array([[4, 1, -1, 1], [3, -2, 5, 6]], dtype=np.float32)
    first = np.array([[1, 0, 1, 1], [0, 0, 1, 0]], dtype=np.bool_)
    second = np.array([[1, 1, 0, 0], [0, 0, 0, 1]], dtype=np.bool_)
    # The votes are 2 1 1 1 / 0 0 1 1, and three of eight weights are pruned: the one with two
    # votes, then the two of size 1 with the lowest index.
    expected = [[True, True, True, False], [False, False, False, False]]
    assert plain_vote([first, second], weight, 3 / 8).tolist() == expected


def test_bits_are_read_from_the_lowest() -> None:
    assert unpacked(np.array([0b1011], dtype=np.uint64), (2, 3)).tolist() == [
        [True, True, False],
        [True, False, False],
    ]


def test_blobs_arrive_and_another_hash_is_refused(tmp_path: Path) -> None:
    data = bytes(range(256)) * 10_000
    good = tmp_path / f"{hashlib.sha256(data).hexdigest()}.blob"
    bad = tmp_path / f"{'0' * 64}.blob"
    for blob in (good, bad):
        blob.write_bytes(data)
    assert receive([good], tmp_path / "arrived") > 0
    assert (tmp_path / "arrived" / "00000").read_bytes() == data
    with pytest.raises(SystemExit, match="expected 0000"):
        receive([bad], tmp_path / "refused")
