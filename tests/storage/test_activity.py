"""A working process holds a lock that ends with the process; its lines are read once."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from espalier.errors import EspalierError
from espalier.storage.activity import FOLDER, AtWork, collect_old_work

WORKING = """
import sys
from pathlib import Path
from espalier.storage.activity import AtWork

with AtWork(Path(sys.argv[1]), "run-1").working():
    print("working", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def work(tmp_path: Path) -> AtWork:
    return AtWork(tmp_path / "state", "run-1")


def test_work_lasts_until_last_one_is_done(work: AtWork) -> None:
    assert not work.anybody()
    with work.working():
        with AtWork(work.path.parent.parent, "run-1").working():
            assert work.anybody()
        assert work.anybody()
        assert not AtWork(work.path.parent.parent, "run-2").anybody()
    assert not work.anybody()


def test_a_process_that_is_killed_is_not_at_work(work: AtWork) -> None:
    command = [sys.executable, "-c", WORKING, str(work.path.parent.parent)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "working\n"
        assert work.anybody()
        child.kill()
        child.wait()
        assert not work.anybody()


def test_lines_are_read_once_and_whole(work: AtWork) -> None:
    assert work.new_lines() == []
    with work.working():
        work.say("one")
        AtWork(work.path.parent.parent, "run-1").say("two")
        assert work.new_lines() == ["one", "two"]
        assert work.new_lines() == []
        with open(work.path, "ab") as file:
            file.write(b"thr")
            file.flush()
            assert work.new_lines() == []
            file.write(b"ee\n")
        assert work.new_lines() == ["three"]


def test_what_was_said_before_a_resumption_is_old(work: AtWork) -> None:
    with work.working():
        work.say("one")
    resumed = AtWork(work.path.parent.parent, "run-1")
    with resumed.working():
        resumed.say("two")
        assert resumed.new_lines() == ["two"]


def test_it_is_for_the_owner_alone(work: AtWork) -> None:
    before = os.umask(0)
    try:
        with work.working():
            work.say("one")
    finally:
        os.umask(before)
    assert work.path.stat().st_mode & 0o777 == 0o600
    assert work.path.parent.stat().st_mode & 0o777 == 0o700


def test_a_place_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file")
    with (
        pytest.raises(EspalierError, match="state-dir"),
        AtWork(tmp_path / "state", "run-1").working(),
    ):
        pass


def test_files_of_old_runs_are_removed(work: AtWork) -> None:
    root = work.path.parent.parent
    for lineage, age in (("old", 100.0), ("new", 10.0)):
        with AtWork(root, lineage).working():
            pass
        then = time.time() - age
        os.utime(AtWork(root, lineage).path, (then, then))
    collect_old_work(root, time.time() - 50.0)
    assert [file.name for file in work.path.parent.glob("*.log")] == ["new.log"]


def test_a_folder_that_is_not_ours_is_left_alone(tmp_path: Path) -> None:
    foreign = tmp_path / FOLDER / "old.log"
    foreign.parent.mkdir()
    foreign.write_text("another program's")
    os.utime(foreign, (1.0, 1.0))
    with (
        pytest.raises(EspalierError, match=r"it contains old.log; name another state-dir"),
        AtWork(tmp_path, "old").working(),
    ):
        pass
    collect_old_work(tmp_path, time.time())
    AtWork(tmp_path, "old").remove()
    assert foreign.read_text() == "another program's"


def test_what_was_never_made_can_be_let_go(work: AtWork) -> None:
    # The file never existed, so there is nothing to remove.
    work.remove()
