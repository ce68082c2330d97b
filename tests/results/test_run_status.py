"""Status of a run from its directory, also of a killed server, which could not write its end."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from espalier.errors import EspalierError
from espalier.results.run_status import RUNNING, run_status
from espalier.storage.directory_lock import locked

HOLDS_IT = """
import sys, time
from pathlib import Path
from espalier.results.run_status import RUNNING, run_status
from espalier.storage.directory_lock import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


def summary(folder: Path, status: str, reason: str | None = None) -> None:
    document = {
        "status": status,
        "reason": reason,
        "finished": 7,
        "num_clients": 8,
        "seconds": 5420.0,
        "method": "flap",
        "metrics": [],
    }
    (folder / "summary.json").write_text(json.dumps(document))


def test_run_status_follows_lock(
    tmp_path: Path,
) -> None:
    summary(tmp_path, RUNNING)
    with locked(tmp_path):
        status, who = run_status(tmp_path)
        assert (status, f"process {os.getpid()} on" in who) == ("running", True)
    status, how = run_status(tmp_path)
    assert (status, f"resume-from={tmp_path}" in how) == ("interrupted", True)


def test_killed_server_leaves_an_interrupted_run(tmp_path: Path) -> None:
    """The lock file still contains the server's name."""
    summary(tmp_path, RUNNING)
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDS_IT, str(tmp_path)], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"held\n"
    assert run_status(tmp_path)[0] == "running"
    process.kill()
    process.wait()
    assert run_status(tmp_path)[0] == "interrupted"


def test_a_look_changes_nothing(tmp_path: Path) -> None:
    summary(tmp_path, RUNNING)
    before = sorted(tmp_path.iterdir())
    run_status(tmp_path)
    assert sorted(tmp_path.iterdir()) == before


def test_run_without_summary_is_running_or_interrupted(tmp_path: Path) -> None:
    """The server writes ``run.json`` first."""
    (tmp_path / "run.json").write_text("{}")
    with locked(tmp_path):
        assert run_status(tmp_path)[0] == "running"
    assert run_status(tmp_path)[0] == "interrupted"


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"status": "running"}', '{"seconds": null}', "[" * 100_000]
)
def test_what_is_no_summary_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text(text)
    with pytest.raises(
        EspalierError, match=r"summary\.json: (is not|contains|lacks|seconds = None)"
    ):
        run_status(tmp_path)
