"""Atomic files: a reader sees the old file or the new one, never a part."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from espalier.errors import EspalierError
from espalier.storage.atomic import replacing, write_bytes, write_json


@pytest.fixture
def old_file(tmp_path: Path) -> Path:
    path = tmp_path / "folder" / "file.bin"
    write_bytes(path, b"old")
    return path


def only_file_in(folder: Path) -> str:
    """Return the name of the only file of the folder; no temporary file is left."""
    (name,) = os.listdir(folder)
    return name


def no_space(*_: object, **__: object) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_the_new_content_replaces_the_old(old_file: Path) -> None:
    write_bytes(old_file, b"the new content")
    assert old_file.read_bytes() == b"the new content"
    assert only_file_in(old_file.parent) == "file.bin"


def test_missing_folders_are_made(tmp_path: Path) -> None:
    write_bytes(tmp_path / "a" / "b" / "c", b"x")
    assert (tmp_path / "a" / "b" / "c").read_bytes() == b"x"


@pytest.mark.parametrize("mode", [0o600, 0o644, 0o640])
def test_the_mode_is_exact_whatever_the_umask(tmp_path: Path, mode: int) -> None:
    before = os.umask(0o077)
    try:
        write_bytes(tmp_path / "file", b"x", mode)
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == mode


def test_old_content_is_seen_until_the_end(old_file: Path) -> None:
    with replacing(old_file) as file:
        file.write(b"new")
        file.flush()
        assert old_file.read_bytes() == b"old"
    assert old_file.read_bytes() == b"new"


def test_nobody_else_can_read_the_unfinished_file(tmp_path: Path) -> None:
    with replacing(tmp_path / "file") as file:
        assert os.fstat(file.fileno()).st_mode & 0o077 == 0


@pytest.mark.parametrize("error", [RuntimeError("writer"), KeyboardInterrupt()])
def test_failing_writer_keeps_old_file(old_file: Path, error: BaseException) -> None:
    def write_half() -> None:
        with replacing(old_file) as file:
            file.write(b"half of the n")
            raise error

    with pytest.raises(type(error)):
        write_half()
    assert old_file.read_bytes() == b"old"
    assert only_file_in(old_file.parent) == "file.bin"


@pytest.mark.parametrize("call", ["fsync", "replace", "chmod"])
def test_full_disk_keeps_old_file(
    old_file: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    monkeypatch.setattr(os, call, no_space)
    with pytest.raises(EspalierError, match=r"cannot write .*file.bin: No space left on device"):
        write_bytes(old_file, b"new")
    assert old_file.read_bytes() == b"old"
    assert only_file_in(old_file.parent) == "file.bin"


def test_disk_filling_while_writing_is_an_error(old_file: Path) -> None:
    def write_half() -> None:
        with replacing(old_file) as file:
            file.write(b"half")
            no_space()

    with pytest.raises(EspalierError, match="No space left"):
        write_half()
    assert old_file.read_bytes() == b"old"
    assert only_file_in(old_file.parent) == "file.bin"


def test_no_room_for_temporary_file_is_an_error(
    old_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.mkstemp", no_space)
    with pytest.raises(EspalierError, match=r"cannot write .*file.bin"):
        write_bytes(old_file, b"new")
    assert old_file.read_bytes() == b"old"


def test_a_folder_that_is_a_file_is_a_mistake(tmp_path: Path) -> None:
    (tmp_path / "folder").write_text("I am a file")
    with pytest.raises(EspalierError, match="cannot write"):
        write_bytes(tmp_path / "folder" / "file", b"x")


def test_unsyncable_directory_is_an_error(old_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.fsync
    calls = []

    def second_fails(handle: int) -> None:
        calls.append(handle)
        real(handle) if len(calls) == 1 else no_space()

    monkeypatch.setattr(os, "fsync", second_fails)
    with pytest.raises(EspalierError):
        write_bytes(old_file, b"new")


def test_file_and_directory_are_synced(old_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    fsync = os.fsync
    replace = os.replace

    def noted_fsync(handle: int) -> None:
        order.append("directory" if os.path.isdir(f"/proc/self/fd/{handle}") else "file")
        fsync(handle)

    def noted_replace(source: str, target: Path) -> None:
        order.append("rename")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "replace", noted_replace)
    write_bytes(old_file, b"new")
    assert order == ["file", "rename", "directory"]


def test_json_keeps_the_order_of_keys(tmp_path: Path) -> None:
    write_json(tmp_path / "file.json", {"b": 1, "a": [1.5, None]})
    text = (tmp_path / "file.json").read_text()
    assert text.endswith("}\n")
    assert list(json.loads(text).items()) == [("b", 1), ("a", [1.5, None])]


def test_non_standard_json_keeps_old_file(
    old_file: Path,
) -> None:
    with pytest.raises(
        EspalierError,
        match=r"cannot write .*: loss is NaN or infinite; the file is unchanged",
    ):
        write_json(old_file, {"loss": float("nan")})
    assert old_file.read_bytes() == b"old"
