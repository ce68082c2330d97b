"""Hash chain of a log: manual changes are found; a crash costs no earlier entry."""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from espalier.storage.hash_chain import HashChain, chain_check

ORIGIN = {"lineage": "20260101-run", "site": "ward"}


def chain(folder: Path) -> HashChain:
    return HashChain(folder / "log.jsonl", ORIGIN)


def filled(folder: Path, entries: int = 4) -> Path:
    log = chain(folder)
    for number in range(entries):
        log.append(
            {
                "entry": "reply",
                "time": f"2026-01-0{number + 1}T00:00:00+00:00",
                "bytes": 10 * (number + 1),
            }
        )
    return log.path


def by_hand(document: dict[str, object]) -> str:
    """Return the hash of a document, computed independently of the program."""
    text = (
        "{"
        + ",".join(f"{json.dumps(key)}:{json.dumps(document[key])}" for key in sorted(document))
        + "}"
    )
    return hashlib.sha256(text.encode()).hexdigest()


def test_every_entry_holds_the_previous_hash(tmp_path: Path) -> None:
    before = by_hand(dict(ORIGIN))
    for number, line in enumerate(filled(tmp_path).read_text().splitlines(), start=1):
        entry = json.loads(line)
        assert (entry["number"], entry["before"]) == (number, before)
        before = by_hand({key: value for key, value in entry.items() if key != "sha256"})
        assert entry["sha256"] == before
    checked = chain_check(tmp_path / "log.jsonl", [before])
    assert (checked.fault, checked.entries, checked.head, checked.num_bytes) == ("", 4, before, 100)
    assert (checked.first[:10], checked.last[:10], checked.seen) == (
        "2026-01-01",
        "2026-01-04",
        {before: 4},
    )
    assert checked.origin == ORIGIN


Lines = list[bytes]


@pytest.mark.parametrize(
    ("tamper", "line", "why"),
    [
        (lambda lines: [lines[0], lines[1].replace(b'"bytes":20', b'"bytes":21'), *lines[2:]],
         2, "was changed"),
        (lambda lines: [*lines[:3], lines[3].replace(b'"bytes":40', b'"bytes":41')],
         4, "does not match its own hash"),
        (lambda lines: [lines[0], lines[1].replace(b",", b", ", 1), *lines[2:]],
         2, "was written again in another form"),
        (lambda lines: [lines[0], *lines[2:]], 2, "is entry 3, and entry 2 is missing before it"),
        (lambda lines: lines[1:], 1, "is entry 2, and entry 1 is missing"),
        (lambda lines: lines[3:], 1, "is entry 4, and entries 1 to 3 are missing"),
        (lambda lines: [lines[0], lines[2], lines[1], lines[3]],
         2, "is entry 3, and entry 2 is missing"),
        (lambda lines: [*lines, lines[1]], 5, "is entry 2, but follows entry 4"),
        (lambda lines: [*lines[:2], lines[1], *lines[2:]], 3, "is entry 2, but follows entry 2"),
        (lambda lines: [*lines[:2], b'{"bytes": 3}\n', *lines[2:]], 3, "an entry of the chain"),
        (lambda lines: [*lines[:2], b"\n", *lines[2:]], 3, "an entry of the chain"),
        (lambda lines: [*lines, b'{"bytes": 3}\n'], 5, "an entry of the chain"),
        (lambda lines: [*lines[:2], lines[2][:-5] + b"\n", lines[3]], 3, "an entry of the chain"),
    ],
)  # fmt: skip
def test_what_is_done_to_a_log_by_hand_is_found(
    tmp_path: Path, tamper: Callable[[Lines], Lines], line: int, why: str
) -> None:
    path = filled(tmp_path)
    path.write_bytes(b"".join(tamper(path.read_bytes().splitlines(keepends=True))))
    fault = chain_check(path).fault
    assert fault.startswith(f"line {line}: ")
    assert why in fault
    # The site can still write entries, and the check still finds the fault.
    chain(tmp_path).append({"bytes": 50})
    assert chain_check(path).fault.startswith(f"line {line}: ")


def test_rehashed_entry_breaks_chain(tmp_path: Path) -> None:
    path = filled(tmp_path)
    lines = path.read_bytes().splitlines(keepends=True)
    entry = json.loads(lines[1]) | {"bytes": 21}
    entry["sha256"] = by_hand({key: value for key, value in entry.items() if key != "sha256"})
    forged = json.dumps(entry, sort_keys=True, separators=(",", ":")).encode() + b"\n"
    path.write_bytes(b"".join([lines[0], forged, *lines[2:]]))
    assert (
        chain_check(path).fault
        == "line 3: does not contain the hash of the lines before it: one of them was replaced"
    )


def test_entry_of_another_run_breaks_the_log(tmp_path: Path) -> None:
    path = filled(tmp_path)
    (tmp_path / "other").mkdir()
    other = HashChain(tmp_path / "other" / "log.jsonl", {**ORIGIN, "site": "another"})
    other.append({"bytes": 1})
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([other.path.read_bytes(), *lines[1:]]))
    assert chain_check(path).fault == "line 2: belongs to another run or site: 20260101-run at ward"


def test_truncation_is_found_by_noted_hash(tmp_path: Path) -> None:
    path = filled(tmp_path)
    head = chain_check(path).head
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:3]))
    checked = chain_check(path, [head])
    assert (checked.fault, checked.entries, checked.seen) == ("", 3, {})
    path.write_bytes(b"".join(lines))
    chain(tmp_path).append({"bytes": 1})
    assert chain_check(path, [head]).seen == {head: 4}


@pytest.mark.parametrize("kept", [1, 40, -3], ids=["a byte", "some", "nearly all"])
def test_crash_remains_are_told_and_harmless(tmp_path: Path, kept: int) -> None:
    path = filled(tmp_path)
    *whole, last = path.read_bytes().splitlines(keepends=True)
    torn = last[:kept]
    path.write_bytes(b"".join(whole) + torn)
    checked = chain_check(path)
    assert (checked.fault, checked.entries) == ("", 3)
    assert checked.notes[0].startswith("line 4: is incomplete")
    chain(tmp_path).append({"bytes": 50})
    after = path.read_bytes()
    assert after.startswith(b"".join(whole) + torn + b"\n")
    entry = json.loads(after.splitlines()[-1])
    assert entry["number"] == 4
    assert entry["unchained"] == {
        "bytes": len(torn) + 1,
        "sha256": hashlib.sha256(torn + b"\n").hexdigest(),
    }
    checked = chain_check(path)
    assert (checked.fault, checked.entries, checked.num_bytes) == ("", 4, 110)
    (told,) = checked.notes
    assert told.startswith("line 4: is incomplete: ")
    assert told.endswith("; entry 4 mentions it")
    path.write_bytes(after.replace(torn + b"\n", b"", 1))
    assert "are not those that the entry recorded" in chain_check(path).fault


@pytest.mark.parametrize(
    "line",
    [
        b"garbage",
        b"\x00" * 40,
        b'{"\x1b[2J',
        b'{"before":1,"number":NaN,"sha256":"x"}',
        b'{"before":1,"number":1e999,"sha256":"x"}',
    ],
    ids=["words", "zeros", "control", "NaN", "infinite"],
)
def test_what_no_process_leaves_is_a_fault(tmp_path: Path, line: bytes) -> None:
    """A later valid entry that mentions the line does not hide the fault; the site can go on.

    The last two cases begin like an entry, so they count as torn lines and give a note.
    """
    path = filled(tmp_path)
    path.write_bytes(path.read_bytes() + line + b"\n")
    chain(tmp_path).append({"bytes": 50})
    checked = chain_check(path)
    if line.isascii() and line.startswith(b'{"before"'):
        assert checked.notes[0].startswith("line 5: is incomplete")
    else:
        assert checked.fault == "line 5: is neither an entry of the chain nor the beginning of one"


def test_two_crashes_in_a_row_are_told_too(tmp_path: Path) -> None:
    path = filled(tmp_path)
    path.write_bytes(path.read_bytes() + b'{"before":"ab' + b"\n" + b'{"bef')
    assert chain_check(path).notes[0].startswith("lines 5 to 6: are incomplete")
    chain(tmp_path).append({"bytes": 50})
    checked = chain_check(path)
    assert (checked.fault, checked.entries) == ("", 5)
    assert checked.notes[0].startswith("lines 5 to 6: are incomplete")


def test_entry_without_line_end_counts(tmp_path: Path) -> None:
    path = filled(tmp_path)
    path.write_bytes(path.read_bytes()[:-1])
    assert (chain_check(path).fault, chain_check(path).entries) == ("", 4)
    chain(tmp_path).append({"bytes": 50})
    checked = chain_check(path)
    assert (checked.fault, checked.entries, checked.notes) == ("", 5, [])


def test_failed_append_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = filled(tmp_path)
    before = path.read_bytes()
    write = os.write
    monkeypatch.setattr(os, "write", lambda handle, data: write(handle, data[:20]))
    with pytest.raises(OSError, match="No space left"):
        chain(tmp_path).append({"bytes": 1})
    assert path.read_bytes() == before


def test_amount_read_does_not_grow_with_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = filled(tmp_path, 4)
    read = list[int]()
    pread = os.pread

    def counting(handle: int, size: int, offset: int) -> bytes:
        read.append(size)
        return pread(handle, size, offset)

    monkeypatch.setattr(os, "pread", counting)
    log = chain(tmp_path)
    for _ in range(600):
        log.append({"what": "x" * 1000})
    assert max(read) <= 65_536
    assert len(read) == 600
    # The entry is longer than the first read.
    log.append({"what": "x" * 10**6})
    log.append({"what": "y"})
    assert chain_check(path).entries == 606


WRITER = """
import sys
from pathlib import Path
from espalier.storage.hash_chain import HashChain
log = HashChain(Path(sys.argv[1]), {"lineage": "20260101-run", "site": "ward"})
for number in range(150):
    log.append({"who": sys.argv[2], "what": number})
"""


def test_concurrent_writers_do_not_fork_log(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(path), str(who)]) for who in range(3)
    ]
    assert [writer.wait() for writer in writers] == [0, 0, 0]
    checked = chain_check(path)
    assert (checked.fault, checked.entries) == ("", 450)
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({entry["who"] for entry in entries}) == 3
    assert (path.stat().st_mode & 0o777) == 0o600
