"""Counts behind the bars of the partition plot, and the written image."""

import json
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.partition_plot import OTHERS, counts_per_client, main, plot
from espalier.data.partition import Partition


@pytest.fixture
def file(tmp_path: Path) -> str:
    """Twelve categories; category n has 20 - n records."""
    records = [
        {
            "instruction": f"Question {label}/{number}",
            "context": "",
            "response": "yes",
            "category": f"c{label:02}",
        }
        for label in range(12)
        for number in range(20 - label)
    ]
    path = tmp_path / "dolly.jsonl"
    path.write_text("\n".join(map(json.dumps, records)))
    return str(path)


def test_rarer_labels_are_taken_together(file: str) -> None:
    """Each of three clients holds every third category, such as c00, c03, c06 and c09."""
    counts = counts_per_client(Partition("by-field", 3, 1.0, 0), file, "dolly")
    assert counts[0] == Counter({"c00": 20, "c03": 17, "c06": 14, "c09": 11})
    assert counts[1] == Counter({"c01": 19, "c04": 16, "c07": 13, OTHERS: 10})
    assert counts[2] == Counter({"c02": 18, "c05": 15, "c08": 12, OTHERS: 9})


def test_a_picture_is_written(tmp_path: Path) -> None:
    counts = [Counter({"oak": 3, OTHERS: 1}), Counter({"elm": 2})]
    plot({"a": counts, "b": counts, "c": counts}, "trees", tmp_path / "trees.png")
    assert (tmp_path / "trees.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--file", "nowhere.jsonl"], "nowhere.jsonl: no such file; check --file"),
        (["--alpha", "0"], "--alpha greater than 0"),
        (["--clients", "0"], "--clients must be at least 1"),
        (["--task", "sst2"], "line 1 (task sst2) has no field 'sentence'"),
    ],
)
def test_what_is_wrong_is_told_in_a_line(
    file: str, words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["--task", "dolly", "--file", file, *words])
    assert told in capsys.readouterr().err
