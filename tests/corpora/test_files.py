"""Text and JSON Lines files; mistakes name the file, the line and the field, and never quote the text."""

import json
from pathlib import Path

import pytest

from espalier.corpora.files import json_records, read_text
from espalier.settings.mistakes import Mistake

SECRET = "Anna K., born 1961, diagnosis F32.1"


def texts_of(path: str, field: str) -> list[str]:
    return [located.record.text for located in json_records(path, field, "")]


def lines_file(tmp_path: Path, content: str | bytes) -> str:
    path = tmp_path / "notes.jsonl"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(path)


def refused(path: str, field: str = "text") -> str:
    """Text of the mistake, checked not to quote the file, also not by the errors that led to it."""
    with pytest.raises(Mistake) as caught:
        texts_of(path, field)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__ or caught.value.__context__ is None
    assert "Anna" not in str(caught.value)
    assert path in str(caught.value)
    return str(caught.value)


# ----- text -----------------------------------------------------------------------------------------------------------


def test_a_text_file_is_read_whole(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("one\r\n\ntwö".encode())
    assert "".join(read_text(str(tmp_path / "a.txt"))) == "one\r\n\ntwö"


@pytest.mark.parametrize("content", [b"", b" \n\t\n"])
def test_an_empty_text_file_is_a_mistake(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(Mistake, match=r"a.txt: the file is empty"):
        list(read_text(str(tmp_path / "a.txt")))


def test_text_that_is_not_utf8_is_a_mistake_that_names_the_byte(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(SECRET.encode() + b"\xff")
    with pytest.raises(Mistake, match=rf"a.txt: byte {len(SECRET)} is not UTF-8") as caught:
        list(read_text(str(tmp_path / "a.txt")))
    assert "Anna" not in str(caught.value)


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone")
    assert "".join(read_text(str(tmp_path / "a.txt"))) == "one"


def test_a_missing_file_is_a_mistake_that_names_the_key(tmp_path: Path) -> None:
    with pytest.raises(Mistake, match=r"missing.txt: no such file; check data.path or the node's data-path"):
        list(read_text(str(tmp_path / "missing.txt")))


def test_a_directory_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(Mistake, match="cannot be read"):
        list(read_text(str(tmp_path)))


def test_a_home_directory_is_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a.txt").write_text("at home")
    assert list(read_text("~/a.txt")) == ["at home"]


# ----- JSON Lines -----------------------------------------------------------------------------------------------------


def test_one_field_of_each_record_is_read(tmp_path: Path) -> None:
    records = [{"note": "one\ntwo", "id": 1}, {"id": 2, "note": "dreí \u2028"}]
    path = lines_file(tmp_path, "\n".join(json.dumps(record, ensure_ascii=False) for record in records))
    assert texts_of(path, "note") == ["one\ntwo", "dreí \u2028"]


def test_blank_lines_windows_lines_and_a_byte_order_mark_are_passed_over(tmp_path: Path) -> None:
    path = lines_file(tmp_path, b'\xef\xbb\xbf{"text": "a"}\r\n\r\n  \n{"text": "b"}\n')
    assert texts_of(path, "text") == ["a", "b"]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (SECRET, "line 3 is not JSON"),
        ('{"text": "' + SECRET, "line 3 is not JSON"),
        (b'{"text": "Anna \xff"}', "line 3 is not JSON"),
        (json.dumps([SECRET]), "line 3 is not a JSON object"),
        (json.dumps(SECRET), "line 3 is not a JSON object"),
        (json.dumps({"diagnosis": SECRET}), "line 3 has no field 'text'"),
        (json.dumps({SECRET: "a"}), "line 3 has no field 'text'"),
        (json.dumps({"text": [SECRET]}), "line 3, field 'text' is not a string"),
        (json.dumps({"text": None}), "line 3, field 'text' is not a string"),
    ],
)
def test_a_wrong_line_is_named_by_its_number_and_not_quoted(tmp_path: Path, line: str | bytes, told: str) -> None:
    bytes_of_line = line.encode() if isinstance(line, str) else line
    assert told in refused(lines_file(tmp_path, b'{"text": "fine"}\n\n' + bytes_of_line + b"\n"))


def test_a_line_of_deep_nesting_is_a_mistake(tmp_path: Path) -> None:
    refused(lines_file(tmp_path, "[" * 100_000))


@pytest.mark.parametrize("content", ["", "\n\n"])
def test_a_file_without_records_is_a_mistake(tmp_path: Path, content: str) -> None:
    assert "the file is empty" in refused(lines_file(tmp_path, content))


def test_a_missing_file_of_records_is_a_mistake(tmp_path: Path) -> None:
    assert "no such file" in refused(str(tmp_path / "missing.jsonl"))
