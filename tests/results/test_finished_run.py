import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from espalier.errors import InputError
from espalier.results.finished_run import SUMMARY_VERSION, open_run

SUMMARY = json.dumps({"status": "completed", "method": "flap", "metrics": []})


def test_run_directory_is_read(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text(SUMMARY)
    (tmp_path / "settings.toml").write_text('method = "flap"\n[lora]\nrank = 4\n')
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "metrics.jsonl").write_text('{"a": 1}\n{"a": 2')
    run = open_run(tmp_path)
    assert run.summary["status"] == "completed"
    assert (run.setting("method"), run.setting("lora.rank")) == ("flap", 4)
    assert run.setting("lora.rank.no") is None
    assert run.model == tmp_path / "model"
    assert run.adapter is None
    assert run.client_models == {}
    assert list(run.json_lines("metrics.jsonl")) == [{"a": 1}]
    assert run.json("rounds.json") == {}


@pytest.mark.parametrize("content", [None, "[]", "{", "{}", '{"status": "completed"}'])
def test_other_directories_are_refused(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "summary.json").write_text(content)
    with pytest.raises(InputError, match=r"summary\.json"):
        open_run(tmp_path)


def test_summary_of_a_later_form_is_refused(tmp_path: Path) -> None:
    later = json.loads(SUMMARY) | {"schema_version": SUMMARY_VERSION + 1}
    (tmp_path / "summary.json").write_text(json.dumps(later))
    with pytest.raises(InputError, match=r"schema_version = \d+: a later version of Espalier"):
        open_run(tmp_path)


def test_damaged_settings_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text(SUMMARY)
    run = open_run(tmp_path)
    with pytest.raises(InputError, match=r"settings\.toml: cannot be read"):
        run.setting("method")
    (tmp_path / "settings.toml").write_text("method =")
    with pytest.raises(InputError, match=r"settings\.toml: is not TOML"):
        run.setting("method")


@pytest.mark.parametrize(
    ("content", "reason"), [(b"\xff\xfe\n", "is not UTF-8"), (b'{"a": \n', "line 1 is not JSON")]
)
def test_damaged_lines_are_an_error(tmp_path: Path, content: bytes, reason: str) -> None:
    (tmp_path / "summary.json").write_text(SUMMARY)
    (tmp_path / "ledger.jsonl").write_bytes(content)
    with pytest.raises(InputError, match=rf"ledger\.jsonl: {reason}: .*; copy "):
        list(open_run(tmp_path).json_lines("ledger.jsonl"))


@pytest.mark.parametrize(
    ("name", "document", "place"),
    [
        ("summary.json", {"clients": [{"client": "zero"}]}, "clients.0.client = 'zero'"),
        ("summary.json", {"seconds": True}, "seconds = True"),
        ("summary.json", {"base": {"model": "demo"}}, "base = {'model': 'demo'}"),
        ("plan.json", {"bytes_up": "many"}, "bytes_up = 'many'"),
        ("rounds.json", {"rounds": {"round": 1}}, "rounds = {'round': 1}"),
        ("rounds.json", {"rounds": [{"round": 1, "perplexity": {"wiki": "high"}}]}, "rounds.0."),
        ("seconds.json", {"run": 1.0, "clients": {"0": [1.0]}}, "clients.0 = [1.0]"),
        ("measurements.json", {"models": []}, "repetitions"),
        ("lm_eval.json", {"scores": [1]}, "scores.0 = 1"),
    ],
)
def test_edited_files_are_named_with_place_and_value(
    tmp_path: Path, name: str, document: Mapping[str, Any], place: str
) -> None:
    (tmp_path / "summary.json").write_text(SUMMARY)
    (tmp_path / name).write_text(json.dumps(document))
    with pytest.raises(InputError) as caught:
        open_run(tmp_path).json(name)
    assert str(caught.value).startswith(f"{tmp_path / name}: {place}")
    assert str(caught.value).endswith("; restore the file from a backup")


def test_an_edited_line_is_named_by_its_number(tmp_path: Path) -> None:
    entry = {"direction": "up", "kind": "train", "block": None, "wire_bytes": 3}
    lines = [entry, {**entry, "wire_bytes": None}]
    (tmp_path / "summary.json").write_text(SUMMARY)
    (tmp_path / "ledger.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    with pytest.raises(InputError, match=r"ledger\.jsonl: line 2: wire_bytes = None: "):
        list(open_run(tmp_path).json_lines("ledger.jsonl"))
