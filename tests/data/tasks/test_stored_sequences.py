"""Stored sequences against the sequences from which they were made."""

from pathlib import Path
from typing import Any

import pytest
import torch

from espalier.data.tasks.encoding import Encoded, Marked
from espalier.data.tasks.stored_sequences import StoredSequences
from espalier.training.packing import PackedSequences


def some_sequences(number: int) -> list[Encoded | Marked]:
    generator = torch.Generator().manual_seed(number)
    made: list[Encoded | Marked] = []
    for length in torch.randint(2, 30, (number,), generator=generator).tolist():
        token_ids = tuple(torch.randint(0, 1 << 20, (length,), generator=generator).tolist())
        if length % 3:
            made.append(Encoded(token_ids, length // 2))
        else:
            made.append(Marked(token_ids, ((0, 1), (length - 1, length)), items=(length,)))
    return made


def no_folder() -> Path:
    raise AssertionError("a short store needs no folder")


@pytest.mark.parametrize("in_memory", [1 << 24, 50, 1])
def test_sequences_are_returned_as_they_were_given(
    in_memory: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("espalier.data.tasks.stored_sequences.IN_MEMORY", in_memory)
    given = some_sequences(40)
    stored = StoredSequences(iter(given), lambda: tmp_path)
    expected = [Marked(one.token_ids, one.spans, items=one.items) for one in given]
    assert list(stored) == stored[:] == expected
    assert stored[-1] == expected[-1]
    assert stored[3:9:2] == expected[3:9:2]
    with pytest.raises(IndexError):
        stored[40]
    # The file has no name.
    assert not list(tmp_path.iterdir())


def test_a_long_store_is_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []

    def temporary(dir: Path | None) -> Any:
        opened.append(dir)
        return original(dir=dir)

    original = __import__("tempfile").TemporaryFile
    monkeypatch.setattr("espalier.data.tasks.stored_sequences.tempfile.TemporaryFile", temporary)
    monkeypatch.setattr("espalier.data.tasks.stored_sequences.IN_MEMORY", 100)
    StoredSequences([Encoded(tuple(range(100)), 1)], lambda: tmp_path)
    assert not opened
    StoredSequences([Encoded(tuple(range(60)), 1)] * 9, lambda: tmp_path)
    assert opened == [tmp_path]


def test_no_sequences() -> None:
    assert not StoredSequences([], no_folder)
    assert not list(StoredSequences([], no_folder))


def test_packed_rows_of_stored_sequences_are_those_of_the_given_ones() -> None:
    given = some_sequences(60)
    rows = PackedSequences(StoredSequences(given, no_folder), 40)
    assert list(rows) == rows[:] == list(PackedSequences(given, 40))
