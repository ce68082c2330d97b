"""Files that are not UTF-8 text: the error names their format and quotes nothing."""

import bz2
import gzip
import io
import json
import lzma
import os
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from espalier.data.files.file_kinds import kind_refused
from espalier.data.files.file_text import FileText
from espalier.data.files.files import JsonLinesRows, TextRows
from espalier.data.public_text import public_text
from espalier.data.tasks.catalogue import TASKS
from espalier.data.tasks.task_source import items_in
from espalier.errors import EspalierError

TEXT = "".join(f"Anna K., née à Gênes, {n}\n" for n in range(60))

READ: dict[str, Callable[[str], object]] = {
    "text": lambda path: list(TextRows(path, "data.path").rows()),
    "jsonl": lambda path: list(JsonLinesRows(path, "data.path").rows()),
    "public": lambda path: list(FileText(path, "evaluation.texts")),
    "task": lambda path: list(items_in(TASKS["sst2"], path).items()),
}


def zipped() -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        archive.writestr("notes.jsonl", TEXT)
    return made.getvalue()


def tarred() -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        member = tarfile.TarInfo("notes.jsonl")
        member.size = len(TEXT.encode())
        archive.addfile(member, io.BytesIO(TEXT.encode()))
    return made.getvalue()


FILES = {
    "bzip2": (bz2.compress(TEXT.encode()), r"the file is compressed \(bzip2\)"),
    "xz": (lzma.compress(TEXT.encode()), r"the file is compressed \(xz\)"),
    "gzip": (gzip.compress(TEXT.encode())[:-40], "the gzip data are damaged or end early"),
    "zstd": (b"\x28\xb5\x2f\xfd\x04\x00" + bytes(40), "the Zstandard data are damaged"),
    "zip": (zipped(), "the file is a zip archive"),
    "tar": (tarred(), r"the file is compressed \(a tar archive\)"),
    "parquet": (
        b"PAR1\x15\x04\x15\x00" + bytes(40),
        "the file is a Parquet file; its name must end with .parquet",
    ),
    "pointer": (
        b"version https://git-lfs.github.com/spec/v1\noid",
        "the file is a Git LFS pointer",
    ),
    "utf-16": (TEXT.encode("utf-16"), "the file is UTF-16, not UTF-8; convert it"),
    "utf-16-le": (
        TEXT.encode("utf-16-le"),
        "the file is UTF-16LE without a byte order mark, not UTF-8",
    ),
    "utf-16-be": (TEXT.encode("utf-16-be"), "the file is UTF-16BE without a byte order mark"),
    "utf-32": (TEXT.encode("utf-32"), "the file is UTF-32, not UTF-8"),
    "utf-32-le": (TEXT.encode("utf-32-le"), "the file is UTF-32LE without a byte order mark"),
    "utf-32-be": (TEXT.encode("utf-32-be"), "the file is UTF-32BE without a byte order mark"),
    "latin-1": (TEXT.encode("latin-1"), "is not UTF-8.*Latin-1"),
    "nul": (TEXT.encode()[:700] + b"\x00" + TEXT.encode()[701:], "byte 700 is NUL"),
    "empty": (b"", "the file is empty"),
    "blank": (b"\n \n", "the file is empty"),
}


@pytest.mark.parametrize("how", READ)
@pytest.mark.parametrize("kind", FILES)
def test_what_a_file_is_stands_in_the_error(kind: str, how: str, tmp_path: Path) -> None:
    content, told = FILES[kind]
    path = tmp_path / "notes.jsonl"
    path.write_bytes(content)
    if (kind, how) == ("gzip", "public"):
        told = r"the file is compressed \(gzip\); unpack it"
    with pytest.raises(
        EspalierError, match=rf"{path}.*{told}" if kind != "latin-1" else told
    ) as refused:
        READ[how](str(path))
    assert "Anna" not in str(refused.value)


@pytest.mark.parametrize("how", READ)
def test_directories_and_pipes_are_no_files(how: str, tmp_path: Path) -> None:
    with pytest.raises(
        EspalierError,
        match=r"cannot be read \(Is a directory\); check .*, which must name a file|names no files",
    ):
        READ[how](str(tmp_path))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(EspalierError, match=r"cannot be read \(a pipe or device"):
        READ[how](str(tmp_path / "pipe"))


@pytest.mark.parametrize(
    "beginning",
    ["BZh", "ORC", "PAR1", "ARROW1", "Obj", "PK", "Rar!", "7z", "été", "\ufeffé", "漢字"],
)
def test_text_resembling_other_file_kinds_is_text(beginning: str, tmp_path: Path) -> None:
    text = f"{beginning} is how this text begins, née à Gênes. " * 30
    for end in range(60):
        assert kind_refused(text.encode()[: 40 + end]) == ""
    (tmp_path / "a.txt").write_text(text)
    assert "".join(FileText(str(tmp_path / "a.txt"), "k")) == text.removeprefix("\ufeff")


@pytest.mark.parametrize("text", ["abcé".encode()[:-1], "abcé\n\nb".encode("latin-1")])
def test_a_passage_that_ends_within_a_character_may_be_cut_or_latin_1(
    text: bytes, tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_bytes(text)
    for how in ("text", "public"):
        with pytest.raises(
            EspalierError,
            match=r"byte 3 is not UTF-8; convert it .* CP1252 .* cut off there, copy it",
        ):
            READ[how](str(tmp_path / "a.txt"))


@pytest.mark.parametrize("begin", ['{"text": "a"}\n', '\ufeff[\n {"text" : 1}]', '{\n "note":'])
def test_json_is_not_read_as_text(begin: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(begin)
    for how in ("text", "public"):
        with pytest.raises(EspalierError, match=r"begins like JSON.*must end with \.jsonl"):
            READ[how](str(tmp_path / "a.txt"))
    with pytest.raises(EspalierError, match=r"evaluation.texts: .* is a file of records"):
        public_text("notes", str(tmp_path / "a.jsonl"))


def test_an_escaped_nul_is_text(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "a\0b"}))
    (row,) = JsonLinesRows(str(tmp_path / "a.jsonl"), "data.path").rows()
    assert row.record["text"] == "a\0b"
