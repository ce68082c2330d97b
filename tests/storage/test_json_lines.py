"""Append-only files with one JSON object per line."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from espalier.storage.atomic import JsonLines


def entries(log: JsonLines) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.path.read_text().splitlines()]


def test_entries_come_back_in_order(tmp_path: Path) -> None:
    log = JsonLines(tmp_path / "folder" / "log.jsonl")
    for number in range(3):
        log.append({"number": number, "text": "two\nlines"})
    assert entries(log) == [{"number": number, "text": "two\nlines"} for number in range(3)]
    assert log.path.read_bytes().count(b"\n") == 3


def test_a_later_process_appends(tmp_path: Path) -> None:
    JsonLines(tmp_path / "log.jsonl").append({"a": 1})
    JsonLines(tmp_path / "log.jsonl").append({"a": 2})
    assert entries(JsonLines(tmp_path / "log.jsonl")) == [{"a": 1}, {"a": 2}]


def test_a_line_that_was_torn_takes_none_with_it(tmp_path: Path) -> None:
    log = JsonLines(tmp_path / "log.jsonl")
    log.path.write_text('{"a": 1}\n{"a": ')
    log.append({"a": 3})
    log.append({"a": 4})
    assert log.path.read_text().splitlines() == ['{"a": 1}', '{"a": ', '{"a": 3}', '{"a": 4}']


def test_unusual_line_separators_stay_in_line(tmp_path: Path) -> None:
    log = JsonLines(tmp_path / "log.jsonl")
    log.append({"text": "a\u2028b\u0085c\x0bd\re"})
    assert entries(log) == [{"text": "a\u2028b\u0085c\x0bd\re"}]


def test_invalid_json_leaves_file_alone(tmp_path: Path) -> None:
    log = JsonLines(tmp_path / "log.jsonl")
    log.append({"loss": 1.0})
    with pytest.raises(ValueError, match="not JSON compliant"):
        log.append({"loss": float("nan")})
    assert entries(log) == [{"loss": 1.0}]


def test_a_full_disk_is_not_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The OSError makes the egress check refuse to send the reply."""

    def no_space(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    log = JsonLines(tmp_path / "log.jsonl")
    log.append({"number": 1})
    monkeypatch.setattr(os, "write", no_space)
    with pytest.raises((OSError, ValueError), match="No space left"):
        log.append({"number": 2})
    monkeypatch.undo()
    assert entries(log) == [{"number": 1}]


def test_disk_filling_within_line_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system call then reports fewer bytes and no error."""
    write = os.write
    monkeypatch.setattr(os, "write", lambda handle, data: write(handle, data[: len(data) // 2]))
    with pytest.raises((OSError, ValueError)):
        JsonLines(tmp_path / "log.jsonl").append({"number": 2})
