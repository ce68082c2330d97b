"""Checks of a run directory before a run is resumed."""

import errno
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from espalier.errors import EspalierError
from espalier.hf.opening.opened_model import OpenedModel
from espalier.settings.run import of_the_result, parse
from espalier.storage.directory_lock import locked
from server_app.preflight import open_all
from server_app.run_directory import require_run_directory
from tests.federation.resuming.interrupted_runs import Interrupted, remains


def looked_at(one_killed: Interrupted, **changes: Any) -> None:
    """Open everything that ``espalier run`` checks before it starts a run."""
    open_all(one_killed.bench.config(**changes), lambda line: pytest.fail(line))


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda run: (run / "run.json").unlink(), "resume-from = .* is not a run directory"),
        (lambda run: (run / "run.json").write_text("{"), "run.json: is damaged"),
        (
            lambda run: (run / "checkpoint" / "state.json").write_text("{"),
            "state.json: is damaged.* round 1 is intact",
        ),
        (
            lambda run: min((run / "checkpoint" / "blobs").iterdir()).write_text("x"),
            "damaged or missing: .*.blob",
        ),
        (
            lambda run: shutil.rmtree(run / "checkpoint"),
            "checkpoint: is missing or empty, but metrics.jsonl lists finished",
        ),
        (lambda run: (run / "seconds.json").write_text("{"), "seconds.json: is damaged"),
    ],
)
def test_impossible_resumption_is_told_early(
    damage: Callable[[Path], Any],
    told: str,
    one_killed: Interrupted,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = one_killed.again(tmp_path, monkeypatch)
    damage(run)
    before = remains(run)
    with pytest.raises(EspalierError, match=told):
        looked_at(one_killed, resume_from=str(run))
    assert remains(run) == before


def test_run_without_checkpoint_does_not_restart(
    one_killed: Interrupted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = one_killed.again(tmp_path, monkeypatch)
    shutil.rmtree(run / "checkpoint")
    with pytest.raises(
        EspalierError, match=r"metrics\.jsonl lists finished rounds; restore it from a backup"
    ):
        one_killed.resume(run)


def test_changed_settings_and_lock_are_told_early(
    one_killed: Interrupted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = one_killed.again(tmp_path, monkeypatch)
    with pytest.raises(
        EspalierError, match="a resumed run keeps its settings, but seed was 0, is 5"
    ):
        looked_at(one_killed, resume_from=str(run), seed=5)
    with locked(run):
        before = remains(run)
        with pytest.raises(EspalierError, match=f"process {os.getpid()} on .* is working there"):
            looked_at(one_killed, resume_from=str(run))
        assert remains(run) == before


def test_out_dir_below_dangling_link_is_told(
    one_killed: Interrupted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_killed.again(tmp_path, monkeypatch)
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(EspalierError, match=r"link is a link to nothing\); name another directory"):
        looked_at(one_killed, out_dir=str(tmp_path / "link" / "runs"))


def test_inspection_holds_and_changes_nothing(
    one_killed: Interrupted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = one_killed.again(tmp_path, monkeypatch)
    before = remains(run)
    settings = parse(one_killed.bench.config(resume_from=str(run)), simulation=True)
    require_run_directory(settings, OpenedModel(one_killed.bench.model))
    assert remains(run) == before
    (run / "lock").unlink()
    require_run_directory(settings, OpenedModel(one_killed.bench.model))
    assert not (run / "lock").exists()


def test_a_run_of_another_version_is_told(
    one_killed: Interrupted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The key is one that the version which began the run did not have."""
    run = one_killed.again(tmp_path, monkeypatch)
    real = of_the_result
    monkeypatch.setattr(
        "server_app.run_directory.of_the_result", lambda nested: real(nested) | {"lora.new": 0.0}
    )
    with pytest.raises(
        EspalierError,
        match=r"another version of Espalier began .* has lora.new\); continue it with",
    ):
        looked_at(one_killed, resume_from=str(run))


@pytest.mark.parametrize(
    ("below", "told"),
    [
        ("file", "Not a directory"),
        ("file/runs", "Not a directory"),
        ("x" * 300, "File name too long"),
    ],
)
def test_impossible_out_dir_is_told_early(
    one_killed: Interrupted, tmp_path: Path, below: str, told: str
) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(
        EspalierError, match=rf"out-dir = '.*cannot be made \({told}\); name another directory"
    ):
        looked_at(one_killed, out_dir=str(tmp_path / below))


def test_an_out_dir_is_not_made_before(
    one_killed: Interrupted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = parse(one_killed.bench.config(out_dir=str(tmp_path / "a" / "b")), simulation=True)
    require_run_directory(settings, OpenedModel(one_killed.bench.model))
    assert not (tmp_path / "a").exists()
    closed = tmp_path / "closed"
    closed.mkdir()
    make = tempfile.mkdtemp

    def refuse(dir: Path) -> str:
        # The tests may run as a user who can write everywhere.
        if dir == closed:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return make(dir=dir)

    monkeypatch.setattr(tempfile, "mkdtemp", refuse)
    with pytest.raises(EspalierError, match=r"cannot be made \(Permission denied\)"):
        looked_at(one_killed, out_dir=str(closed / "runs"))
