import json
from pathlib import Path

import pytest

from espalier.errors import InputError
from espalier.results.finished_run import open_run


def test_run_directory_is_read(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text('{"status": "completed"}')
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


@pytest.mark.parametrize("content", [None, "[]", "{"])
def test_other_directories_are_refused(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "summary.json").write_text(content)
    with pytest.raises(InputError, match=r"summary\.json"):
        open_run(tmp_path)


def test_damaged_settings_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text(json.dumps({}))
    run = open_run(tmp_path)
    with pytest.raises(InputError, match=r"settings\.toml: cannot be read"):
        run.setting("method")
    (tmp_path / "settings.toml").write_text("method =")
    with pytest.raises(InputError, match=r"settings\.toml: is not TOML"):
        run.setting("method")


@pytest.mark.parametrize("content", [b"\xff\xfe\n", b'{"a": \n'])
def test_damaged_lines_are_an_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "summary.json").write_text("{}")
    (tmp_path / "ledger.jsonl").write_bytes(content)
    with pytest.raises(InputError, match=r"ledger\.jsonl: is not JSON Lines: .*; copy it again"):
        list(open_run(tmp_path).json_lines("ledger.jsonl"))
