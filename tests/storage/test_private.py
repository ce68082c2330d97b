"""A node's private state: permissions, lock, version, rounds that are kept."""

import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from espalier.settings.mistakes import Mistake
from espalier.storage.private import PrivateState

LOCKING = """
import sys
from pathlib import Path
from espalier.storage.private import PrivateState

print("trying", flush=True)
with PrivateState(Path(sys.argv[1]), "run-1", 3).locked():
    with open(sys.argv[2], "a") as events:
        events.write("child\\n")
    print("held", flush=True)
    sys.stdin.readline()
"""
"""A second process of the same client: says when it holds the lock, and holds it until it is told to let go."""


@pytest.fixture(autouse=True)
def _generous_umask() -> Iterator[None]:
    """What is owner-only must be so by itself, not by luck of the environment."""
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.fixture
def state(tmp_path: Path) -> PrivateState:
    return PrivateState(tmp_path / "state", "run-1", 3)


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def filled(state: PrivateState) -> PrivateState:
    with state.locked():
        state.save(1, "report", {"seconds": 1.5})
        state.blobs(1).put(b"masks")
    return state


# ----- permissions ----------------------------------------------------------------------------------------------------


def test_every_folder_is_for_the_owner_alone(state: PrivateState) -> None:
    filled(state)
    folders = [state.root, *(path for path in state.root.rglob("*") if path.is_dir())]
    assert {str(folder.relative_to(state.root)): oct(mode(folder)) for folder in folders} == {
        ".": "0o700",
        "run-1": "0o700",
        "run-1/00003": "0o700",
        "run-1/00003/r001": "0o700",
    }


def test_every_document_and_blob_is_for_the_owner_alone(state: PrivateState) -> None:
    files = [path for path in filled(state).root.rglob("*") if path.is_file() and path.name != "lock"]
    assert len(files) == 3
    assert {mode(file) for file in files} == {0o600}


def test_the_lock_is_for_the_owner_alone(state: PrivateState) -> None:
    assert mode(filled(state).folder / "lock") == 0o600


def test_a_directory_that_cannot_be_made_is_a_mistake_that_names_the_key(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with (
        pytest.raises(Mistake, match=r"state-dir = .*file/state"),
        PrivateState(tmp_path / "file" / "state", "run-1", 0).locked(),
    ):
        pass


# ----- documents and rounds -------------------------------------------------------------------------------------------


def test_what_is_saved_can_be_loaded_by_a_later_process(state: PrivateState) -> None:
    state.save(2, "report", {"seconds": 1.5, "blob_sha256": ["a"]})
    assert PrivateState(state.root, "run-1", 3).load(2, "report") == {"seconds": 1.5, "blob_sha256": ["a"]}


def test_what_was_never_saved_loads_as_none(state: PrivateState) -> None:
    state.save(2, "report", {})
    assert state.load(2, "other") is None
    assert state.load(3, "report") is None


@pytest.mark.parametrize(("lineage", "rank"), [("run-1", 4), ("run-2", 3)])
def test_clients_and_runs_do_not_see_each_other(state: PrivateState, lineage: str, rank: int) -> None:
    state.save(1, "report", {"mine": True})
    assert PrivateState(state.root, lineage, rank).load(1, "report") is None


def test_a_full_disk_keeps_the_old_document(state: PrivateState, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(_: int) -> None:
        raise OSError(28, "No space left on device")

    state.save(1, "report", {"round": "old"})
    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(Mistake, match="No space left"):
        state.save(1, "report", {"round": "new"})
    assert state.load(1, "report") == {"round": "old"}


def test_the_last_two_rounds_are_kept(state: PrivateState) -> None:
    for server_round in range(6):
        state.save(server_round, "report", {"round": server_round})
    state.collect_garbage(4)
    kept = [server_round for server_round in range(6) if state.load(server_round, "report") is not None]
    assert kept == [3, 4, 5]


def test_garbage_of_large_round_numbers_is_found(state: PrivateState) -> None:
    for server_round in (998, 999, 1000, 1001):
        state.save(server_round, "report", {})
    state.collect_garbage(1001)
    assert [number for number in (998, 999, 1000, 1001) if state.load(number, "report") is not None] == [1000, 1001]


def test_collecting_garbage_before_anything_was_saved_does_nothing(state: PrivateState) -> None:
    state.collect_garbage(5)
    assert not state.root.exists()


def test_state_of_another_version_is_refused(state: PrivateState) -> None:
    with state.locked():
        pass
    (state.folder / "version.json").write_text('{"version": 99}')
    with pytest.raises(Mistake, match="version 99"), state.locked():
        pass


def test_a_damaged_version_file_is_a_mistake(state: PrivateState) -> None:
    filled(state)
    (state.folder / "version.json").write_text("")
    with pytest.raises(Mistake), state.locked():
        pass


# ----- the lock -------------------------------------------------------------------------------------------------------


def second_process(state: PrivateState, events: Path) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", LOCKING, str(state.root), str(events)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    )


def let_go(child: "subprocess.Popen[str]") -> None:
    child.communicate("let go\n", timeout=600)
    assert child.returncode == 0


def test_while_another_process_holds_the_lock_it_cannot_be_had(state: PrivateState, tmp_path: Path) -> None:
    child = second_process(state, tmp_path / "events")
    assert child.stdout is not None
    assert [child.stdout.readline(), child.stdout.readline()] == ["trying\n", "held\n"]
    with open(state.folder / "lock", "w") as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    let_go(child)
    with state.locked():
        pass


def test_a_second_process_waits_until_the_first_is_done(state: PrivateState, tmp_path: Path) -> None:
    events = tmp_path / "events"
    with state.locked():
        child = second_process(state, events)
        assert child.stdout is not None
        assert child.stdout.readline() == "trying\n"
        with open(events, "a") as file:
            file.write("parent\n")
    assert child.stdout.readline() == "held\n"
    let_go(child)
    assert events.read_text() == "parent\nchild\n"


def test_another_client_is_not_kept_waiting(state: PrivateState) -> None:
    with state.locked(), PrivateState(state.root, "run-1", 4).locked():
        pass


def test_the_lock_is_free_again_after_an_error(state: PrivateState) -> None:
    with pytest.raises(RuntimeError), state.locked():
        raise RuntimeError
    with state.locked():
        pass
