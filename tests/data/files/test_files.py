"""Text and JSON Lines files; errors name the file, line and field and never quote the text."""

import json
from pathlib import Path

import pytest

from espalier.data.files.files import JsonLinesRows, TextRows
from espalier.data.files.rows import text_of as record_of
from espalier.errors import EspalierError

KEYS = "data.path or the node's data-path"
SECRET = "Anna K., born 1961, diagnosis F32.1"


def text_of(path: str) -> list[str]:
    return [row.record["text"] for row in TextRows(path, KEYS).rows()]


def texts_of(path: str, field: str) -> list[str]:
    return [record_of(row, field).text for row in JsonLinesRows(path, KEYS).rows()]


def labels_of(path: str, field: str) -> list[str]:
    return [record_of(row, "text", field).label for row in JsonLinesRows(path, KEYS).rows()]


def lines_file(tmp_path: Path, content: str | bytes) -> str:
    path = tmp_path / "notes.jsonl"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(path)


def refused(path: str, field: str = "text") -> str:
    """Return the error text; neither it nor a chained exception quotes the file."""
    with pytest.raises(EspalierError) as caught:
        texts_of(path, field)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__ or caught.value.__context__ is None
    assert "Anna" not in str(caught.value)
    assert path in str(caught.value)
    return str(caught.value)


# ----- text ---------------------------------------------------------------------------------------


def test_a_text_file_is_read_whole(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("one\r\n\ntwö".encode())
    assert text_of(str(tmp_path / "a.txt")) == ["one", "twö"]


@pytest.mark.parametrize("content", [b"", b" \n\t\n"])
def test_an_empty_text_file_is_a_mistake(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(EspalierError, match=r"a.txt: the file is empty"):
        text_of(str(tmp_path / "a.txt"))


def test_invalid_utf8_names_the_byte(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(SECRET.encode() + b"\xff")
    with pytest.raises(EspalierError, match=rf"a.txt: byte {len(SECRET)} is not UTF-8") as caught:
        text_of(str(tmp_path / "a.txt"))
    assert "Anna" not in str(caught.value)


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone")
    assert text_of(str(tmp_path / "a.txt")) == ["one"]


def test_missing_file_names_its_setting(tmp_path: Path) -> None:
    with pytest.raises(
        EspalierError, match=r"missing.txt: no such file; check data.path or the node's data-path"
    ):
        text_of(str(tmp_path / "missing.txt"))


def test_a_directory_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(EspalierError, match="Is a directory"):
        text_of(str(tmp_path))


def test_a_home_directory_is_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a.txt").write_text("at home")
    assert text_of("~/a.txt") == ["at home"]


# ----- JSON Lines ---------------------------------------------------------------------------------


def test_one_field_of_each_record_is_read(tmp_path: Path) -> None:
    records = [{"note": "one\ntwo", "id": 1}, {"id": 2, "note": "dreí \u2028"}]
    path = lines_file(
        tmp_path, "\n".join(json.dumps(record, ensure_ascii=False) for record in records)
    )
    assert texts_of(path, "note") == ["one\ntwo", "dreí \u2028"]


def test_blank_lines_crlf_and_bom_are_skipped(tmp_path: Path) -> None:
    path = lines_file(tmp_path, b'\xef\xbb\xbf{"text": "a"}\r\n\r\n  \n{"text": "b"}\n')
    assert texts_of(path, "text") == ["a", "b"]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (SECRET, "line 3 is not JSON"),
        ('{"text": "' + SECRET, "line 3 is not JSON"),
        (b'{"text": "Anna \xff"}', "line 3 is not UTF-8 (byte 16 of the line)"),
        (json.dumps([SECRET]), "line 3 is not a JSON object"),
        (json.dumps(SECRET), "line 3 is not a JSON object"),
        (json.dumps({"diagnosis": SECRET}), "line 3 has no field 'text'"),
        (json.dumps({SECRET: "a"}), "line 3 has no field 'text'"),
        (json.dumps({"text": [SECRET]}), "line 3, field 'text' is not a string"),
        (json.dumps({"text": None}), "line 3, field 'text' is not a string"),
    ],
)
def test_malformed_line_is_numbered_not_quoted(
    tmp_path: Path, line: str | bytes, told: str
) -> None:
    bytes_of_line = line.encode() if isinstance(line, str) else line
    assert told in refused(lines_file(tmp_path, b'{"text": "fine"}\n\n' + bytes_of_line + b"\n"))


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (
            '{"text": "Anna"},',
            "line 1 is not JSON: it ends with a comma; JSON Lines has no commas between lines",
        ),
        ("[", "line 1 is not JSON: it begins an array that does not end on this line"),
        (
            '[{"text": "Anna"},',
            "line 1 is not JSON: it begins an array that does not end on this line",
        ),
        (
            '[{"text": "Anna"}]',
            (
                "line 1 is not a JSON object but a list; write one JSON object per line"
                " (for an array: jq -c '.[]'"
            ),
        ),
        ("{", "line 1 is not JSON: it begins an object that does not end on this line (jq -c '.'"),
        ('{"text": "Anna', "line 1 is not JSON: the string in column 10 does not end on this line"),
        (
            '{"text": "Anna\tK."}',
            "line 1 is not JSON: a control character in column 15 is not escaped",
        ),
        (
            '{"text": "Anna"}{"text": "K."}',
            "line 1 is not JSON: more text follows the first value, in column 17",
        ),
        ('{"text": "Anna" "K."}', "line 1 is not JSON: Expecting ',' delimiter in column 17"),
        (
            "{'text': 'Anna'}",
            "line 1 is not JSON: Expecting property name enclosed in double quotes in column 2",
        ),
        ('{"text": "\\A"}', "line 1 is not JSON: Invalid \\escape in column 11"),
        (
            "id,text",
            ("line 1 is not JSON: it does not begin with {; plain text and CSV rows are not JSON"),
        ),
        ('{"text": 1' + "0" * 5000 + "}", "a number has too many digits"),
        ("null", "line 1 is not a JSON object but null"),
        ("7", "line 1 is not a JSON object but a number"),
        (
            '{"text": 7}',
            (
                "line 1, field 'text' is not a string but a number; write it as a string,"
                " or set data.field"
            ),
        ),
        ('{"text": null}', "line 1, field 'text' is not a string but null"),
        ('{"text": true}', "line 1, field 'text' is not a string but a boolean"),
        ('{"text": NaN}', "line 1, field 'text' is not a string but a number that is not finite"),
        ('{"text": {"text": "Anna"}}', "line 1, field 'text' is not a string but an object"),
        ('{"text": ["Anna"]}', "line 1, field 'text' is not a string but a list"),
        ('{"text": "Anna \\ud83d"}', "line 1, field 'text' contains half of a surrogate pair"),
        (
            '{"message": {"content": "Anna"}, "id": 3, "born in 1961": 0}',
            (
                "line 1 has no field 'text', it has the fields message (an object), id (a number),"
                " 1 more; set data.field"
            ),
        ),
        (
            '{"Anna K.": 1}',
            "has no field 'text', it has 1 field with names that are not shown here",
        ),
        ("{}", "line 1 has no field 'text', it has no fields"),
    ],
)
def test_reason_quotes_nothing_of_the_line(tmp_path: Path, line: str, told: str) -> None:
    assert told in refused(lines_file(tmp_path, line + "\n"))


@pytest.mark.parametrize("label", [None, [1], {"a": 1}, float("nan"), float("inf")])
def test_invalid_label_is_refused_by_type(tmp_path: Path, label: object) -> None:
    path = lines_file(tmp_path, json.dumps({"text": "a", "ward": label}))
    with pytest.raises(
        EspalierError,
        match=(
            r"line 1, field 'ward' is not a label but (null|a list|an object|a number that is no)"
        ),
    ):
        labels_of(path, "ward")
    with pytest.raises(
        EspalierError,
        match=r"line 1 has no field 'kind', it has the fields text \(a string\), ward",
    ):
        labels_of(path, "kind")


@pytest.mark.parametrize(
    ("label", "expected"), [("a", "a"), (3, "3"), (0.5, "0.5"), (True, "True"), ("", "")]
)
def test_labels_are_strings_numbers_or_booleans(
    tmp_path: Path, label: object, expected: str
) -> None:
    path = lines_file(tmp_path, json.dumps({"text": "a", "ward": label}))
    assert labels_of(path, "ward") == [expected]


def test_a_line_of_deep_nesting_is_a_mistake(tmp_path: Path) -> None:
    refused(lines_file(tmp_path, "[" * 100_000))


@pytest.mark.parametrize("content", ["", "\n\n"])
def test_a_file_without_records_is_a_mistake(tmp_path: Path, content: str) -> None:
    assert "the file is empty" in refused(lines_file(tmp_path, content))


def test_a_missing_file_of_records_is_a_mistake(tmp_path: Path) -> None:
    assert "no such file" in refused(str(tmp_path / "missing.jsonl"))
