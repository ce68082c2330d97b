"""List of runs (``espalier runs``)."""

import json
from pathlib import Path

import pytest

from espalier.cli.command import main as command
from espalier.results.figures import main_quality
from espalier.results.finished_run import open_run
from espalier.results.run_list import find_runs, listed, main
from espalier.storage.directory_lock import locked
from tests.results.run_directories import metric, save_run


def test_row_of_completed_run(tmp_path: Path) -> None:
    run = save_run(tmp_path / "20260102-030405-flap-1")
    row = listed(run)
    assert (row.status, row.method, row.model) == ("completed", "flap", "base")
    assert (row.metric, row.dataset, row.federated, row.dense) == ("perplexity", "wiki", 12.0, 10.0)
    assert (row.parameters, row.bytes_on_disk, row.is_adapter) == (800.0, 3200.0, False)
    assert (row.clients, row.finished, row.seconds) == (4, 4, 5.0)
    assert row.started == "2026-01-02 03:04"


def test_score_is_the_main_figure_if_there_is_one(tmp_path: Path) -> None:
    acc = metric("boolq", 0.7, name="acc", direction="higher")
    loss = metric("boolq", 0.5, name="loss")
    unknown = metric("wiki", None)
    run = open_run(save_run(tmp_path / "a", metrics=[unknown, loss, acc]))
    quality = main_quality(run)
    assert quality is not None
    assert quality.title == "boolq acc"
    assert main_quality(open_run(save_run(tmp_path / "b", metrics=[unknown]))) is None


def test_runs_are_found_in_folders_but_not_in_runs(tmp_path: Path) -> None:
    inner = save_run(tmp_path / "sweep" / "cell" / "run")
    outer = save_run(tmp_path / "run")
    save_run(outer / "egress" / "copy")
    save_run(tmp_path / "1" / "2" / "3" / "too-deep")
    (tmp_path / "link").symlink_to(tmp_path / "sweep")
    assert list(find_runs(tmp_path)) == [outer, inner]


def test_list_shows_every_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_run(tmp_path / "at-work", status="running", metrics=[], size={}, finished=None)
    save_run(tmp_path / "done")
    killed_run = save_run(tmp_path / "killed", status="running", seconds=0.0)
    (killed_run / "seconds.json").write_text('{"run": 70.0, "clients": {}}')
    save_run(tmp_path / "lost", status="failed", reason="RunFailed: " + "why " * 200)
    with locked(tmp_path / "at-work"):
        assert main({"directories": [str(tmp_path)], "json": False}) == 0
    table, _, lines = capsys.readouterr().out.partition("└")
    assert table.splitlines()[0].strip() == f"{tmp_path}/"
    rows = [line.split("│")[1:] for line in table.splitlines() if line.startswith("│")]
    assert [row[0].strip() for row in rows] == ["at-work", "done", "killed", "lost"]
    assert [row[1].strip() for row in rows] == ["running", "completed", "interrupted", "failed"]
    assert [row[8].strip() for row in rows][:3] == ["-", "5 s", "70 s"]
    assert [row[5].strip() for row in rows][:2] == ["-", "wiki perplexity 12.00 (10.00)"]
    at_work, killed, lost = lines.splitlines()[1:]
    assert "running (process" in at_work
    assert f"resume-from={tmp_path / 'killed'}" in killed
    assert len(lost) < len(str(tmp_path)) + 350


def test_list_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    size = {"federated": {"parameters": 10, "bytes": 40, "folder": "adapter"}}
    save_run(tmp_path / "a", size=size)
    assert main({"directories": [str(tmp_path)], "json": True}) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["path"], row["is_adapter"], row["parameters"]) == (str(tmp_path / "a"), True, 10)


def test_one_bad_directory_does_not_hide_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = save_run(tmp_path / "good")
    (tmp_path / "empty").mkdir()
    bad = save_run(tmp_path / "bad", metrics=[{"name": 1}])
    names = [str(tmp_path / name) for name in ("empty", "nothing", "good", "bad")]
    assert main({"directories": names, "json": False}) == 2
    told = capsys.readouterr()
    assert f"{tmp_path / 'empty'}: contains no run" in told.err
    assert f"{tmp_path / 'nothing'}: is not a directory" in told.err
    assert f"{run.name} " in told.out
    assert (
        f"{bad}: unreadable ({bad / 'summary.json'}: metrics.0.name = 1:"
        " Input should be a valid string" in told.out
    )


def test_command_reads_the_directory(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    save_run(tmp_path / "a")
    assert command(["runs", str(tmp_path)]) == 0
    assert "completed" in capfd.readouterr().out
