"""Texts without blank lines are cut into short parts, the same in memory as in a file.

Other texts stay as they are.
"""

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from espalier.data import passages as long_passages
from espalier.data import token_pieces
from espalier.data.client_text import client_samples
from espalier.data.files import files
from espalier.data.files.corpus_index import open_corpus
from espalier.data.files.file_text import FileText
from espalier.data.files.files import JsonLinesRows, TextRows
from espalier.data.passages import passages, split
from espalier.data.public_text import public_samples
from espalier.data.text_source import TextSource
from espalier.errors import EspalierError
from espalier.progress import progress_listener
from espalier.settings.node import simulated_node
from espalier.settings.run import parse

PIECES = (
    "a",
    "bb",
    "ä",
    "€",
    " ",
    "  ",
    "\t",
    "\n",
    "\n",
    "\n \n",
    "\n\n",
    "\x0c",
    "\u2028",
    "cccccccccccc",
)


def strange_text(seed: int) -> str:
    generator = random.Random(seed)
    return "".join(generator.choices(PIECES, k=generator.randint(0, 80))) + "z"


def by_blank_lines(text: str) -> list[str]:
    """Return the passages without a limit of their length."""
    found = (passage.strip("\n").rstrip() for passage in re.split(r"\n(?:[ \t]*\n)+", f"\n{text}"))
    return [passage for passage in found if passage]


@pytest.mark.parametrize(
    ("passage", "expected"),
    [
        # The cut is at the last newline among the first ten bytes.
        ("aa bb\ncc\ndd ee", ["aa bb\ncc", "dd ee"]),
        ("aa bb cc dd ee", ["aa bb cc", "dd ee"]),
        ("aa bb cc dd\nee", ["aa bb cc", "dd\nee"]),
        ("aaaaaaaaaabbbb", ["aaaaaaaaaa", "bbbb"]),
        # A cut never divides a character.
        ("aaaaaaaaa€bbbb", ["aaaaaaaaa", "€bbbb"]),
        ("aaaaaaaaaa", ["aaaaaaaaaa"]),
        # Trailing blanks do not make a passage long.
        ("aaaaaaaaaa     ", ["aaaaaaaaaa"]),
        ("         aa a", ["aa a"]),
        # The newline directly after the first ten bytes is a valid cut.
        ("aa bb cccc\ndd", ["aa bb cccc", "dd"]),
        ("aa bb cccc dd", ["aa bb cccc", "dd"]),
    ],
)
def test_where_a_long_passage_is_cut(
    monkeypatch: pytest.MonkeyPatch, passage: str, expected: list[str]
) -> None:
    monkeypatch.setattr(long_passages, "LONGEST_PASSAGE", 10)
    assert [part.strip() for part in passages(passage)] == expected


def test_file_is_cut_like_text_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.txt"
    for seed in range(300):
        text = strange_text(seed)
        path.write_bytes(text.encode())
        monkeypatch.setattr(long_passages, "LONGEST_PASSAGE", 5 + seed % 31)
        monkeypatch.setattr(files, "BLOCK_BYTES", 1 + seed % 9)
        file = TextRows(str(path), "data.path")
        rows = list(file.rows())
        found = [row.record["text"] for row in rows]
        assert found == list(passages(text))
        assert all(len(one.encode()) <= long_passages.LONGEST_PASSAGE for one in found)
        assert [one["text"] for one in file.at(row.place for row in rows)] == found
        assert "".join("".join(found).split()) == "".join(text.split())


def test_short_passages_are_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(300):
        assert list(passages(strange_text(seed))) == by_blank_lines(strange_text(seed))
    longest = "a " * (long_passages.LONGEST_PASSAGE // 2 - 1) + "aa"
    assert list(passages(f"{longest}\n\n{longest}a")) == [longest, longest[:-3], "aaa"]


@pytest.mark.parametrize("form", ["text", "jsonl"])
def test_parts_are_a_client_s_passages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    """The parts equal those of text in memory.

    A row of the index names a part by its bytes in a text file, or by its place in a JSON Lines
    record.
    """
    monkeypatch.setattr(long_passages, "LONGEST_PASSAGE", 40)
    text = "\n".join(f"line {number} of a text without a blank one" for number in range(200))
    path = tmp_path / "a"
    path.write_text(text if form == "text" else json.dumps({"text": text}))
    file = (TextRows if form == "text" else JsonLinesRows)(str(path), "data.path")
    index = open_corpus(TextSource((file,)), tmp_path / "state")
    assert tuple(map(list, index.share())) == split([text])
    assert len(index) >= 200


class Words:
    """Tokenizer whose tokens are lengths of words; it records the length of its longest text."""

    def __init__(self) -> None:
        self.longest = 0

    def __call__(self, text: str) -> list[int]:
        self.longest = max(self.longest, len(text))
        return [len(word) for word in re.split(r"(\s)", text) if word]


@pytest.mark.parametrize("between", ["\n", " "])
def test_single_lines_are_tokenised_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, between: str
) -> None:
    monkeypatch.setattr(long_passages, "LONGEST_PASSAGE", 500)
    monkeypatch.setattr(token_pieces, "PIECE_CHARACTERS", 2000)
    path = tmp_path / "a.txt"
    path.write_text(between.join(f"line {number} of many" for number in range(3000)) + "\n")
    given: dict[str, Any] = {
        "num-clients": 1,
        "data.source": "files",
        "data.path": str(path),
        "data.sequence-length": 16,
    }
    settings = parse(
        given
        | {
            "evaluation.texts": f"a={path}",
            "evaluation.sequence-length": 16,
            "evaluation.max-samples": 0,
        }
    )
    encode = Words()
    heard = list[str]()
    monkeypatch.setattr(files, "BLOCK_BYTES", path.stat().st_size // 4 + 1)
    with progress_listener(heard.append):
        client_samples(settings, simulated_node(state_dir=str(tmp_path / "state")), encode, 0)
        public = public_samples(settings.evaluation, encode)["a"]
    said = [line.split(",")[0] for line in heard]
    assert [line for line in said if line.startswith("reading")] == [
        f"reading a.txt: {n}%" for n in (25, 50, 75, 100)
    ] * 2
    assert sum(line.startswith("tokenising") for line in said) > 20
    assert encode.longest < 2000 + 500 + token_pieces.LONGEST_CONTEXT
    whole = Words()(path.read_text())
    assert public.flatten().tolist() == whole[: len(whole) // 16 * 16]


# ----- the text of a file, unchanged --------------------------------------------------------------


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_stretches_of_a_file_are_its_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mark: bytes
) -> None:
    path = tmp_path / "a.txt"
    for seed in range(200):
        text = strange_text(seed) + ("\r\n" if seed % 2 else "")
        path.write_bytes(mark + text.encode())
        monkeypatch.setattr(long_passages, "LONGEST_PASSAGE", 5 + seed % 31)
        monkeypatch.setattr(files, "BLOCK_BYTES", 1 + seed % 9)
        found = FileText(str(path), "evaluation.texts")
        stretches = list(found)
        assert "".join(stretches) == text
        assert all(len(one.encode()) <= long_passages.LONGEST_PASSAGE + 1 for one in stretches)
        assert (len(found), found[-1], found[1:3]) == (
            len(stretches),
            stretches[-1],
            stretches[1:3],
        )


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "the file is empty"),
        (b" \n\t\n" * 9, "the file is empty"),
        (b"eleven byte\xff and more", "byte 11 is not UTF-8"),
        (b"\xef\xbb\xbfeight by\xff", "byte 11 is not UTF-8"),
        (b"\x80" * 40, "byte 0 is not UTF-8"),
    ],
)
def test_a_text_that_cannot_be_used_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, told: str
) -> None:
    monkeypatch.setattr(long_passages, "LONGEST_PASSAGE", 10)
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(EspalierError, match=rf"a\.txt: {told}"):
        FileText(str(tmp_path / "a.txt"), "evaluation.texts")


def test_a_missing_text_is_told_with_the_key(tmp_path: Path) -> None:
    with pytest.raises(EspalierError, match=r"no such file; check evaluation\.texts"):
        FileText(str(tmp_path / "none.txt"), "evaluation.texts")
    with pytest.raises(EspalierError, match=r"cannot be read .*; check evaluation\.texts"):
        FileText(str(tmp_path), "evaluation.texts")


def test_a_text_that_changes_meanwhile_is_told(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("some words")
    found = FileText(str(path), "evaluation.texts")
    path.write_text("some more words")
    with pytest.raises(EspalierError, match="changed while it was read"):
        list(found)
