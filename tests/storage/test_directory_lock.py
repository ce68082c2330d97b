"""Lock of a directory: one process at a time; a killed process releases it."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from espalier.errors import EspalierError
from espalier.storage.directory_lock import locked

HOLDS_IT = """
import sys, time
from pathlib import Path
from espalier.storage.directory_lock import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


def test_a_second_one_is_told_who_holds_it(tmp_path: Path) -> None:
    with locked(tmp_path):
        holder = (
            rf"process {os.getpid()} on {socket.gethostname()} \(since \d{{4}}-\d\d-\d\dT.*\) is"
            r" working there"
        )
        with pytest.raises(EspalierError, match=holder), locked(tmp_path):
            pass
    with locked(tmp_path):
        pass


def test_an_error_lets_it_go(tmp_path: Path) -> None:
    with pytest.raises(KeyError), locked(tmp_path):
        raise KeyError
    assert (tmp_path / "lock").read_text() == ""
    with locked(tmp_path):
        pass


def test_a_killed_process_keeps_nobody_out(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDS_IT, str(tmp_path)], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"held\n"
    with pytest.raises(EspalierError, match=f"process {process.pid} on"), locked(tmp_path):
        pass
    process.kill()
    process.wait()
    assert json.loads((tmp_path / "lock").read_text())["pid"] == process.pid
    with locked(tmp_path):
        assert json.loads((tmp_path / "lock").read_text())["pid"] == os.getpid()


@pytest.mark.parametrize("content", ["", "{", "[]", "3"])
def test_a_holder_without_a_name_is_a_holder(tmp_path: Path, content: str) -> None:
    with locked(tmp_path):
        (tmp_path / "lock").write_text(content)
        with (
            pytest.raises(EspalierError, match="another process is working there"),
            locked(tmp_path),
        ):
            pass


def test_missing_directory_is_an_error(tmp_path: Path) -> None:
    with (
        pytest.raises(EspalierError, match="lock: cannot be opened: No such file"),
        locked(tmp_path / "none"),
    ):
        pass
