"""Sequences of records and groups: each depends on its own text only."""

import json
from pathlib import Path
from typing import Any

import pytest

from espalier.data.privacy_units import cut_sequences, padded, record_sequences
from espalier.errors import EspalierError
from espalier.settings.node import NodeSettings, parse_node, simulated_node
from espalier.settings.run import parse


def encode(text: str) -> list[int]:
    """Return the number of characters of each word."""
    return [len(word) for word in text.split()]


def written(folder: Path, records: list[dict[str, str]]) -> Path:
    path = folder / "records.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def found(node: NodeSettings, **changes: Any) -> list[list[tuple[int, ...]]]:
    flat = {
        "method": "pooled-pruning", "privacy.epsilon": 1.0, "evaluation.local-baseline": False,
        "data.sequence-length": 4,
    }  # fmt: skip
    given = {key.replace("__", ".").replace("_", "-"): value for key, value in changes.items()}
    return record_sequences(parse(flat | given), node, encode, 0)


def at_a_site(folder: Path, path: Path, **more: Any) -> NodeSettings:
    config = {"site": "a", "data-path": str(path), "state-dir": str(folder), "min-tokens": 1}
    return parse_node(config | {key.replace("_", "-"): value for key, value in more.items()})


def words(number: int, letter: str) -> str:
    """Return words of 1, 2, ... letters."""
    return " ".join(letter * (place + 1) for place in range(number))


def kept(records: list[dict[str, str]], **more: str) -> list[dict[str, str]]:
    """Return the records that are not held out; a hash of the text decides."""
    from espalier.data.passages import is_held_out

    return [record for record in records if not is_held_out(record["text"])]


def test_tokens_of_a_record_are_cut() -> None:
    assert cut_sequences(range(9), 4) == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert cut_sequences(range(10), 4) == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9)]
    assert cut_sequences([7], 4) == []


def test_sequences_are_padded_behind_their_end() -> None:
    samples, lengths = padded([(1, 2, 3), (4, 5)], 4)
    assert samples.tolist() == [[1, 2, 3, 0], [4, 5, 0, 0]]
    assert lengths.tolist() == [3, 2]
    assert padded([], 4)[0].shape == (0, 4)


def test_a_record_has_sequences_of_its_own(tmp_path: Path) -> None:
    """Other records, before and behind it, do not move its text."""
    records = kept([{"text": words(3 + place, "abcdefgh"[place])} for place in range(8)])
    alone = [found(at_a_site(tmp_path, written(tmp_path, [record]))) for record in records]
    together = found(at_a_site(tmp_path, written(tmp_path, records)))
    assert together == [own for (own,) in alone]


def test_all_passages_of_a_record_are_one_unit(tmp_path: Path) -> None:
    records = kept([{"text": f"{words(3, 'a')}\n\n{words(5, 'b')}\n\n{words(2, 'c')}"}])
    (own,) = found(at_a_site(tmp_path, written(tmp_path, records)), data__sequence_length=64)
    assert len(own) == 1


def test_a_group_is_one_unit_and_keeps_passages_that_others_have_too(tmp_path: Path) -> None:
    """With duplicates left out, a group would get text when another one leaves."""
    shared = words(4, "s")
    records = [{"text": f"{words(3, letter)}", "patient": letter} for letter in "abcdefgh"] + [
        {"text": shared, "patient": letter} for letter in "abcdefgh"
    ]
    path = written(tmp_path, records)
    groups = found(at_a_site(tmp_path, path, data_group="patient"), data__sequence_length=64)
    assert 4 <= len(groups) <= 8
    assert all(own == [(1, 2, 3, 1, 2, 3, 4)] for own in groups)
    fewer = written(tmp_path, [record for record in records if record["patient"] != "a"])
    left = found(at_a_site(tmp_path, fewer, data_group="patient"), data__sequence_length=64)
    assert all(own in groups for own in left)


def test_a_simulated_client_has_the_group_of_the_run(tmp_path: Path) -> None:
    records = [{"text": words(3 + place, "a"), "author": "abcd"[place % 4]} for place in range(12)]
    path = written(tmp_path, records)
    node = simulated_node(site="a", data_path=str(path), state_dir=str(tmp_path))
    groups = found(node, data__group="author", data__sequence_length=64, data__source="files",
                   data__path=str(path))  # fmt: skip
    assert len(groups) <= 4
    assert max(len(own) for group in groups for own in group) > 14


def test_too_little_text_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, kept([{"text": words(3, letter)} for letter in "abc"]))
    with pytest.raises(EspalierError, match="min-tokens = 1000"):
        found(at_a_site(tmp_path, path, min_tokens=1000))
    with pytest.raises(EspalierError, match="no record of two tokens"):
        found(at_a_site(tmp_path, written(tmp_path, kept([{"text": "x"}, {"text": "yy"}]))))
