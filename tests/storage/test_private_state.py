"""Private state of a node: permissions, lock, version and stored rounds."""

import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from espalier.errors import EspalierError
from espalier.storage.client_state import (
    VERSION_FILE,
    PrivateState,
    collect_old_runs,
    lineages_of,
    mark_as_ours,
    remove_run,
)
from tests.run_names import BY_HAND, named

LOCKING = """
import sys
from pathlib import Path
from espalier.storage.client_state import PrivateState

print("trying", flush=True)
with PrivateState(Path(sys.argv[1]), "20260131-093000-0123456789ab", "ward", \
{"client": 3}).locked():
    with open(sys.argv[2], "a") as events:
        events.write("child\\n")
    print("held", flush=True)
    sys.stdin.readline()
"""
"""Second process of the same client; it holds the lock until its input ends."""


@pytest.fixture(autouse=True)
def _generous_umask() -> Iterator[None]:
    """Remove the umask, so that owner-only files get their mode from the program."""
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.fixture
def state(tmp_path: Path) -> PrivateState:
    return PrivateState(tmp_path / "state", BY_HAND, "ward", {"client": 3})


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def filled(state: PrivateState) -> PrivateState:
    with state.locked():
        state.save(1, "report", {"seconds": 1.5})
        state.blobs(1).put(b"masks")
    return state


# ----- permissions --------------------------------------------------------------------------------


def test_every_folder_is_for_the_owner_alone(state: PrivateState) -> None:
    filled(state)
    folders = [state.root, *(path for path in state.root.rglob("*") if path.is_dir())]
    assert {str(folder.relative_to(state.root)): oct(mode(folder)) for folder in folders} == {
        ".": "0o700",
        BY_HAND: "0o700",
        f"{BY_HAND}/ward": "0o700",
        f"{BY_HAND}/ward/r001": "0o700",
    }


def test_documents_and_blobs_are_owner_only(state: PrivateState) -> None:
    files = [
        path for path in filled(state).root.rglob("*") if path.is_file() and path.name != "lock"
    ]
    assert len(files) == 3
    assert {mode(file) for file in files} == {0o600}


def test_the_lock_is_for_the_owner_alone(state: PrivateState) -> None:
    assert mode(filled(state).folder / "lock") == 0o600


def test_impossible_directory_names_its_key(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with (
        pytest.raises(EspalierError, match=r"state-dir = .*file/state"),
        PrivateState(tmp_path / "file" / "state", BY_HAND, "ward", {"client": 0}).locked(),
    ):
        pass


@pytest.mark.parametrize("what", [VERSION_FILE, "r001/report.json"])
@pytest.mark.parametrize(
    "content", ["", "[]", '"text"', "7", "[" * 100_000, '{"version": 5, "client": [1]}']
)
def test_invalid_document_is_told_as_damaged(state: PrivateState, what: str, content: str) -> None:
    (filled(state).folder / what).write_text(content)
    if what == VERSION_FILE:
        with pytest.raises(EspalierError, match=r"version.json: is damaged; remove the directory"):
            state.require_same_client()
    elif not content.startswith("{"):
        with pytest.raises(EspalierError, match=r"report.json: is damaged"):
            state.load(1, "report")


@pytest.mark.parametrize("length", range(4057, 4100, 7))
def test_overlong_path_names_key_or_file(tmp_path: Path, length: int) -> None:
    """The system's limit may be reached at any place below the directory.

    A node refuses much shorter paths at its start.
    """
    root = tmp_path
    while len(str(root)) + 202 < length:
        root /= "x" * 200
    root /= "x" * (length - len(str(root)) - 1)
    told = r"state-dir = '|(cannot write .*version.json|lock: cannot be opened): File name too long"
    with (
        pytest.raises(EspalierError, match=told),
        PrivateState(root, BY_HAND, "ward", {"client": 0}).locked(),
    ):
        pass


# ----- documents and rounds -----------------------------------------------------------------------


def test_saved_data_is_loaded_by_later_process(state: PrivateState) -> None:
    state.save(2, "report", {"seconds": 1.5, "blob_sha256": ["a"]})
    assert PrivateState(state.root, BY_HAND, "ward", {"client": 3}).load(2, "report") == {
        "seconds": 1.5,
        "blob_sha256": ["a"],
    }


def test_what_was_never_saved_loads_as_none(state: PrivateState) -> None:
    state.save(2, "report", {})
    assert state.load(2, "other") is None
    assert state.load(3, "report") is None


@pytest.mark.parametrize(("lineage", "site"), [(BY_HAND, "other"), (named("2"), "ward")])
def test_sites_and_runs_do_not_see_each_other(state: PrivateState, lineage: str, site: str) -> None:
    """Two sites may share a state directory, and both may be client 3 of their run."""
    state.save(1, "report", {"mine": True})
    assert PrivateState(state.root, lineage, site, {"client": 3}).load(1, "report") is None


def test_a_full_disk_keeps_the_old_document(
    state: PrivateState, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_space(_: int) -> None:
        raise OSError(28, "No space left on device")

    state.save(1, "report", {"round": "old"})
    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(EspalierError, match="No space left"):
        state.save(1, "report", {"round": "new"})
    assert state.load(1, "report") == {"round": "old"}


def test_the_last_two_rounds_are_kept(state: PrivateState) -> None:
    for server_round in range(6):
        state.save(server_round, "report", {"round": server_round})
    state.collect_garbage(4)
    kept = [
        server_round for server_round in range(6) if state.load(server_round, "report") is not None
    ]
    assert kept == [3, 4, 5]


def test_garbage_of_large_round_numbers_is_found(state: PrivateState) -> None:
    for server_round in (998, 999, 1000, 1001):
        state.save(server_round, "report", {})
    state.collect_garbage(1001)
    assert [
        number for number in (998, 999, 1000, 1001) if state.load(number, "report") is not None
    ] == [1000, 1001]


def test_collecting_before_any_save_does_nothing(state: PrivateState) -> None:
    state.collect_garbage(5)
    assert not state.root.exists()


def test_state_of_another_version_is_refused(state: PrivateState) -> None:
    with state.locked():
        pass
    (state.folder / VERSION_FILE).write_text('{"version": 99}')
    with pytest.raises(EspalierError, match="version 99"), state.locked():
        pass


# ----- the lock -----------------------------------------------------------------------------------


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


def test_held_lock_cannot_be_had(state: PrivateState, tmp_path: Path) -> None:
    child = second_process(state, tmp_path / "events")
    assert child.stdout is not None
    assert [child.stdout.readline(), child.stdout.readline()] == ["trying\n", "held\n"]
    with open(state.folder / "lock", "w") as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    let_go(child)
    with state.locked():
        pass


def test_second_process_waits_for_first(state: PrivateState, tmp_path: Path) -> None:
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
    with state.locked(), PrivateState(state.root, BY_HAND, "other", {"client": 3}).locked():
        pass


def test_the_lock_is_free_again_after_an_error(state: PrivateState) -> None:
    with pytest.raises(RuntimeError), state.locked():
        raise RuntimeError
    with state.locked():
        pass


# ----- one client per site and run ----------------------------------------------------------------


def test_a_site_is_one_client_of_a_run(state: PrivateState) -> None:
    filled(state)
    with PrivateState(state.root, BY_HAND, "ward", {"client": 3}).locked():
        pass
    other = PrivateState(state.root, BY_HAND, "ward", {"client": 4})
    with (
        pytest.raises(
            EspalierError, match="takes part in this run with another client; start a new run"
        ),
        other.locked(),
    ):
        pass
    with pytest.raises(EspalierError, match="another client"):
        other.require_same_client()
    with PrivateState(state.root, named("2"), "ward", {"client": 4}).locked():
        pass
    assert lineages_of(state.root, "ward") == {BY_HAND, named("2")}
    assert lineages_of(state.root, "other") == set()


def test_enrolled_site_gets_its_rank_later(
    state: PrivateState,
) -> None:
    """The run counts from then on and can be deleted like any other."""
    asked = PrivateState(state.root, BY_HAND, "ward", {"settings": "a"})
    asked.note_asked()
    assert lineages_of(state.root, "ward") == {BY_HAND}
    assert mode(state.folder / "lock") == 0o600
    with pytest.raises(EspalierError, match="another settings"):
        PrivateState(state.root, BY_HAND, "ward", {"settings": "b"}).note_asked()
    with PrivateState(state.root, BY_HAND, "ward", {"client": 3, "settings": "a"}).locked():
        # The lock is free, so this does not wait.
        asked.note_asked()
    with pytest.raises(EspalierError, match="another client"):
        PrivateState(
            state.root, BY_HAND, "ward", {"client": 4, "settings": "a"}
        ).require_same_client()
    aged(state.folder)
    collect_old_runs(state.root, LONG_AGO + 1)
    assert not state.folder.exists()


# ----- removal ------------------------------------------------------------------------------------

LONG_AGO = 1_000_000_000


def aged(folder: Path) -> Path:
    os.utime(folder / "lock", (LONG_AGO, LONG_AGO))
    return folder


def test_old_state_is_removed_and_younger_stays(state: PrivateState) -> None:
    old = aged(filled(state).folder)
    young = filled(PrivateState(state.root, named("2"), "ward", {"client": 0})).folder
    collect_old_runs(state.root, LONG_AGO + 1)
    assert not old.parent.exists()
    assert young.exists()


def test_folders_without_version_file_are_kept(tmp_path: Path) -> None:
    """Directories of other programs may have the same depth, locks and version files.

    They stay even if a user chose their parent as ``state-dir`` by mistake.
    """
    ours = tmp_path / "run" / "ward"
    others = []
    for number, (name, content) in enumerate(
        (
            ("precious", "x"),
            ("version.json", '{"version": 5}'),
            (VERSION_FILE, "{"),
            (VERSION_FILE, "[]"),
            (VERSION_FILE, "{}"),
        )
    ):
        folder = tmp_path / "program" / f"data-{number}"
        folder.mkdir(parents=True)
        (folder / "lock").write_text("")
        (folder / name).write_text(content)
        others.append(aged(folder))
    ours.mkdir(parents=True)
    mark_as_ours(ours)
    (ours / "lock").write_text("")
    linked = tmp_path / "links" / "ward"
    linked.parent.mkdir()
    linked.symlink_to(tmp_path / "kept", target_is_directory=True)
    (tmp_path / "kept").mkdir()
    mark_as_ours(tmp_path / "kept")
    (tmp_path / "kept" / "lock").write_text("")
    for folder in (ours, tmp_path / "kept"):
        aged(folder)
    collect_old_runs(tmp_path, LONG_AGO + 1)
    assert not ours.exists()
    assert all(folder.exists() for folder in [*others, tmp_path / "kept"])


def foreign(folder: Path, name: str = "precious") -> Path:
    """Write another program's file into a directory at a place that we would use."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("x")
    return folder / name


@pytest.mark.parametrize("name", ["precious", "lock"])
def test_foreign_directory_is_refused_unmarked(state: PrivateState, name: str) -> None:
    precious = foreign(state.folder, name)
    for write in (
        state.locked().__enter__,
        lambda: state.save(1, "report", {}),
        lambda: state.blobs(1),
    ):
        with pytest.raises(
            EspalierError,
            match=(
                f"Espalier did not create this directory, and it contains {name};"
                " name another state-"
            ),
        ):
            write()
    assert not (state.folder / VERSION_FILE).exists()
    if name != "lock":
        aged(state.folder)
        collect_old_runs(state.root, LONG_AGO + 1)
    remove_run(state.root, BY_HAND)
    assert precious.read_text() == "x"


def test_an_empty_directory_is_taken(state: PrivateState) -> None:
    """A directory that a process left when it was killed while marking it is taken too."""
    state.folder.mkdir(parents=True)
    (state.folder / "lock").touch()
    (state.folder / f".{VERSION_FILE}.x7").write_text("{")
    filled(state)
    assert state.load(1, "report") == {"seconds": 1.5}


def test_of_a_run_only_our_own_is_removed(state: PrivateState) -> None:
    filled(state)
    precious = foreign(state.root / BY_HAND / "theirs")
    linked = state.root / BY_HAND / "linked"
    linked.symlink_to(filled(PrivateState(state.root, named("2"), "ward", {"client": 0})).folder)
    remove_run(state.root, BY_HAND)
    assert not state.folder.exists()
    assert precious.exists()
    assert (linked / "r001").exists()
    remove_run(state.root, named("2"))
    assert not (state.root / named("2")).exists()
