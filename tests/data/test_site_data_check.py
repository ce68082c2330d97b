"""Check that a site's file holds enough text: small files whole, large ones as far as needed."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from espalier.data import site_data_check
from espalier.data.files.records import Record
from espalier.data.site_data_check import require_enough
from espalier.errors import EspalierError
from espalier.settings.node import NodeSettings, simulated_node
from espalier.settings.run import RunSettings, parse

ENCODED: list[int] = []
"""Lengths of the encoded texts."""


def letters(text: str) -> list[int]:
    """Encode a text with one token per byte and note its length."""
    ENCODED.append(len(text))
    return list(text.encode())


@pytest.fixture(autouse=True)
def nothing_encoded() -> None:
    ENCODED.clear()


def settings(**changes: Any) -> RunSettings:
    return parse(
        {"data.num-samples": 4, "data.sequence-length": 16}
        | {key.replace("__", "."): changes[key] for key in changes}
    )


def site(path: Path, **keys: Any) -> NodeSettings:
    return NodeSettings(site="a", data_path=str(path), **{"min_tokens": 1, **keys})


def text(number: int) -> str:
    return "\n\n".join(f"passage number {index}" for index in range(number))


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site_data_check, "LARGE", 0)


def test_a_small_file_is_read_whole(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(text(100))
    require_enough(settings(), site(tmp_path / "a.txt"), letters)
    (tmp_path / "a.txt").write_bytes(text(100).encode() + b"\xff")
    with pytest.raises(EspalierError, match="is not UTF-8"):
        require_enough(settings(), site(tmp_path / "a.txt"), letters)


@pytest.mark.usefixtures("large")
def test_large_file_is_read_only_as_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run needs 64 tokens; a record has 20 characters, and 10% of the passages are held out."""
    (tmp_path / "a.txt").write_text("x")
    read = []

    def records(*_: object) -> Iterator[Record]:
        for index in range(10**6):
            read.append(index)
            yield f"passage number {index:05d}"

    monkeypatch.setattr(site_data_check, "site_texts", records)
    require_enough(settings(), site(tmp_path / "a.txt"), letters)
    assert len(read) <= 16
    assert max(ENCODED) <= 16 * 22


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("method", ["fedprllm", "fedpetuning"])
def test_too_little_data_gets_round_s_message(tmp_path: Path, method: str) -> None:
    (tmp_path / "a.txt").write_text("too short")
    words = {
        "fedprllm": "gives 0 samples of 16 tokens, but data.num-samples = 4 are needed",
        "fedpetuning": "fewer than data.sequence-length = 16 tokens",
    }
    with pytest.raises(EspalierError, match=words[method]):
        require_enough(settings(method=method), site(tmp_path / "a.txt"), letters)


@pytest.mark.usefixtures("large")
def test_the_site_s_own_number_of_windows_counts(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(text(10))
    with pytest.raises(EspalierError, match=r"data.num-samples = 40 are needed"):
        require_enough(settings(), site(tmp_path / "a.txt", num_samples=40), letters)
    require_enough(settings(), site(tmp_path / "a.txt", num_samples=1), letters)


@pytest.mark.parametrize("bytes_of_a_large_file", [0, 10**6])
def test_items_of_a_task_are_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bytes_of_a_large_file: int
) -> None:
    monkeypatch.setattr(site_data_check, "LARGE", bytes_of_a_large_file)
    file = tmp_path / "a.jsonl"
    tuned = settings(method="fedpetuning", task__name="sst2")
    file.write_text(
        "".join(json.dumps({"sentence": f"fine {n}", "label": 1}) + "\n" for n in range(30))
    )
    require_enough(tuned, site(file, data_task="sst2"), letters)
    with pytest.raises(EspalierError, match="data-task: this site's data-path contains text"):
        require_enough(tuned, site(file), letters)
    file.write_text(json.dumps({"sentence": "fine", "label": 7}) + "\n")
    with pytest.raises(EspalierError, match="line 1"):
        require_enough(tuned, site(file, data_task="sst2"), letters)


def test_site_without_data_is_refused() -> None:
    nowhere = NodeSettings(site="a", min_tokens=1)
    with pytest.raises(EspalierError, match=r"data-path: .* names (no|a) file"):
        require_enough(settings(data__source="files"), nowhere, letters)
    with pytest.raises(EspalierError, match=r"data-path: .* names (no|a) file"):
        require_enough(settings(method="fedpetuning", task__name="sst2"), nowhere, letters)
    require_enough(settings(), nowhere, letters)
    shared = settings(data__source="files", data__path="/shared.txt")
    require_enough(shared, simulated_node(), letters)
    with pytest.raises(EspalierError, match="does not open files that a run names"):
        require_enough(shared, nowhere, letters)
    assert not ENCODED


@pytest.mark.parametrize("bytes_of_a_large_file", [0, 10**6])
def test_windows_below_min_tokens_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bytes_of_a_large_file: int
) -> None:
    monkeypatch.setattr(site_data_check, "LARGE", bytes_of_a_large_file)
    (tmp_path / "a.txt").write_text(text(100))
    require_enough(settings(), site(tmp_path / "a.txt", min_tokens=64), letters)
    with pytest.raises(EspalierError, match="min-tokens = 65"):
        require_enough(settings(), site(tmp_path / "a.txt", min_tokens=65), letters)
