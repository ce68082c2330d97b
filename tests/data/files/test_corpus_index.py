"""Large files: read once in bounded memory; results equal those of small files.

Each client reads only the ranges of its own passages.
"""

import json
import os
import random
import stat
import threading
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from espalier.data.client_text import client_samples, held_out_samples, training_samples
from espalier.data.files import corpus_index, files
from espalier.data.files.corpus_index import open_corpus
from espalier.data.files.files import JsonLinesRows, TextRows
from espalier.data.files.records import Record
from espalier.data.files.rows import text_of
from espalier.data.partition import Partition
from espalier.data.passages import passages, split
from espalier.data.text_source import TextSource
from espalier.errors import EspalierError
from espalier.settings.node import NodeSettings, simulated_node
from espalier.settings.run import parse
from espalier.settings.tables.data import DataSettings
from espalier.storage.client_state import collect_old_runs
from tests.data.client_passages import client_passages
from tests.data.plain_partition import share_of

KEY = "data.path"
KINDS = ("iid", "quantity", "dirichlet", "by-field")


def node(tmp_path: Path) -> NodeSettings:
    return simulated_node(state_dir=str(tmp_path / "state"))


def kept(tmp_path: Path) -> Path:
    """Return the folder of the only indexed file."""
    (folder,) = (tmp_path / "state" / "corpora").iterdir()
    return folder


@pytest.fixture
def kept_on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat small files as large ones, with small blocks, parts and pieces, to reach all cases."""
    monkeypatch.setattr(corpus_index, "LARGE_BYTES", 0)
    monkeypatch.setattr(corpus_index, "ROWS_AT_ONCE", 7)
    monkeypatch.setattr(corpus_index, "SORTED_AT_ONCE", 20)
    monkeypatch.setattr(files, "BLOCK_BYTES", 13)


def strange_text(seed: int) -> str:
    generator = random.Random(seed)
    pieces = (
        "a",
        "b ",
        "ä",
        " ",
        "\t",
        "\n",
        "\n",
        "\n\n",
        "\r\n",
        "\r\n\r\n",
        "\r",
        "\x0b",
        "\x0c",
        "\u2028",
        "\u00a0",
        "x y",
    )
    return "".join(generator.choices(pieces, k=generator.randint(0, 60))) + "z"


def by_hand(records: list[Record], deal: Partition, client: int) -> tuple[list[str], list[str]]:
    """Return the passages as computed without an index, with all records in memory."""
    return split(record.text for record in share_of(deal, client, records))


# ----- the same passages --------------------------------------------------------------------------


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_passages_equal_those_cut_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mark: bytes
) -> None:
    path = tmp_path / "a.txt"
    for seed in range(300):
        text = strange_text(seed)
        path.write_bytes(mark + text.encode())
        monkeypatch.setattr(files, "BLOCK_BYTES", 1 + seed % 9)
        file = TextRows(str(path), KEY)
        found = list(file.rows())
        assert [row.record["text"] for row in found] == list(passages(text))
        assert list(file.at(row.place for row in found)) == [row.record for row in found]


@pytest.mark.parametrize("ending", [b"\n", b"\r\n", b"\r"])
def test_lines_are_those_of_the_whole_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: bytes
) -> None:
    path = tmp_path / "a.jsonl"
    lines = [
        json.dumps({"text": strange_text(seed), "label": seed % 3}).encode() for seed in range(40)
    ]
    path.write_bytes(ending.join([*lines[:20], b"", b"  ", *lines[20:]]))
    monkeypatch.setattr(files, "BLOCK_BYTES", 5)
    found = list(JsonLinesRows(str(path), KEY).rows())
    assert [text_of(row, "text", "label") for row in found] == [
        Record(strange_text(seed), str(seed % 3)) for seed in range(40)
    ]
    data = path.read_bytes()
    assert [data[row.place[0] : row.place[0] + row.place[1]].strip() for row in found] == lines


def test_byte_that_is_not_utf8_is_located(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "BLOCK_BYTES", 4)
    path = tmp_path / "a.txt"
    path.write_bytes(b"one\n\ntwo\n\nth\xffree")
    with pytest.raises(EspalierError, match="byte 12 is not UTF-8"):
        list(TextRows(str(path), KEY).rows())


@pytest.mark.usefixtures("kept_on_disk")
@pytest.mark.parametrize("kind", KINDS)
def test_shares_of_a_json_lines_file(tmp_path: Path, kind: Any) -> None:
    """Covers records of several passages, repeated texts with other labels, and empty texts."""
    generator = random.Random(1)
    texts = [
        "",
        " \n",
        *(f"{seed}\n\n{strange_text(seed % 50)}\n\nshared {seed % 7}" for seed in range(150)),
    ]
    records = [Record(generator.choice(texts), generator.choice("abcde")) for _ in range(200)]
    path = tmp_path / "a.jsonl"
    path.write_text(
        "".join(json.dumps({"text": one.text, "of": one.label}) + "\n" for one in records)
    )
    index = open_corpus(
        TextSource((JsonLinesRows(str(path), KEY),), "text", "of"), tmp_path / "state"
    )
    for clients in (1, 2, 5):
        deal = Partition(kind, clients, 0.5, 3)
        for client in range(clients):
            assert tuple(map(list, index.share(deal, client))) == by_hand(records, deal, client)
    assert tuple(map(list, index.share())) == split(record.text for record in records)


@pytest.mark.usefixtures("kept_on_disk")
def test_shares_of_a_text_file(tmp_path: Path) -> None:
    text = "\n\n".join(strange_text(seed % 180) for seed in range(200))
    path = tmp_path / "a.txt"
    path.write_bytes(text.encode())
    for clients in (1, 3):
        data = DataSettings(source="files", path=str(path))
        deal = Partition("iid", clients, 0.5, 0)
        for client in range(clients):
            expected = by_hand([Record(passage) for passage in passages(text)], deal, client)[0]
            assert client_passages(data, node(tmp_path), client, clients) == expected


# ----- bounded memory, once per machine -----------------------------------------------------------


def large_text(path: Path, megabytes: int) -> None:
    generator = random.Random(0)
    written = 0
    words = [
        "".join(generator.choices("etaoinshrdlu", k=generator.randint(2, 8))) for _ in range(500)
    ]
    lines = [" ".join(generator.choices(words, k=60)) for _ in range(500)]
    with open(path, "w") as file:
        while written < megabytes * 1_000_000:
            written += file.write(
                f"{written} " + "\n".join(generator.choices(lines, k=12)) + "\n\n"
            )


def test_memory_stays_far_below_file_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """6 MB of text for six clients; the tokens are words, so that the tokenizer is fast."""
    path = tmp_path / "a.txt"
    large_text(path, 6)
    monkeypatch.setattr(corpus_index, "LARGE_BYTES", 1 << 20)
    monkeypatch.setattr(files, "BLOCK_BYTES", 1 << 17)
    settings = parse(config_of(path, clients=6))
    counted = [0]
    pread = os.pread

    def counting(file: int, length: int, place: int) -> bytes:
        counted[0] += length if os.fstat(file).st_size == path.stat().st_size else 0
        return pread(file, length, place)

    monkeypatch.setattr(os, "pread", counting)
    monkeypatch.setattr("espalier.data.token_pieces.PIECE_CHARACTERS", 1 << 14)
    tracemalloc.start()
    first = client_samples(settings, node(tmp_path), words, 0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # Room for three blocks, a piece and its tokens, and the rows of a part.
    assert peak < 3_000_000
    assert first.shape == (8, 256)

    # The second client does not read the whole file again.
    monkeypatch.setattr(TextRows, "rows", None)
    counted[0] = 0
    second = client_samples(settings, node(tmp_path), words, 1)
    assert second.tolist() != first.tolist()
    assert path.stat().st_size / 9 < counted[0] < path.stat().st_size / 3


def words(text: str) -> list[int]:
    """Return a token for each newline, and one for each word from its length and last letter."""
    return [
        len(word) * 128 + ord(word[-1]) if word else 10
        for line in text.split("\n")
        for word in [*line.split(), ""]
    ][:-1]


def config_of(path: Path, clients: int) -> dict[str, Any]:
    return {"model": "demo", "num-clients": clients, "data.source": "files", "data.path": str(path)}


@pytest.mark.usefixtures("kept_on_disk")
def test_windows_are_those_of_the_whole_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.txt"
    large_text(path, 1)
    settings = parse(
        config_of(path, clients=2)
        | {
            "data.num-samples": 5,
            "data.sequence-length": 100,
            "evaluation.sequence-length": 100,
        }
    )
    cut = (client_samples, training_samples, held_out_samples)
    whole = [one(settings, node(tmp_path), words, 1).tolist() for one in cut]
    monkeypatch.setattr("espalier.data.token_pieces.PIECE_CHARACTERS", 30_000)
    monkeypatch.setattr("espalier.data.token_pieces.IN_MEMORY", 1000)
    assert [one(settings, node(tmp_path), words, 1).tolist() for one in cut] == whole


# ----- the stored index ---------------------------------------------------------------------------


@pytest.fixture
def large(tmp_path: Path, kept_on_disk: None) -> TextSource:
    path = tmp_path / "a.txt"
    path.write_text("\n\n".join(f"passage {number}" for number in range(50)))
    return TextSource((TextRows(str(path), KEY),))


def test_index_is_private_and_without_text(tmp_path: Path, large: TextSource) -> None:
    open_corpus(large, tmp_path / "state")
    folder = kept(tmp_path)
    for path in (tmp_path / "state", folder.parent, folder):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    for path in folder.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert b"passage" not in path.read_bytes()


def test_a_changed_file_is_read_again(tmp_path: Path, large: TextSource) -> None:
    before = list(open_corpus(large, tmp_path / "state").share()[0])
    path = Path(large.files[0].path)
    times = path.stat()
    path.write_text(path.read_text().replace("passage 1", "passive 1"))
    # The file keeps its size and modification time.
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    after = list(open_corpus(large, tmp_path / "state").share()[0])
    assert after != before
    assert set(after) | set(open_corpus(large, tmp_path / "state").share()[1]) == set(
        passages(path.read_text())
    )


@pytest.mark.parametrize("name", ["rows", "index.json"])
@pytest.mark.parametrize(
    "damage", [lambda data: data[:-7], lambda data: data[:9] + b"?" + data[10:], lambda data: b""]
)
def test_what_was_damaged_is_made_again(
    tmp_path: Path, large: TextSource, name: str, damage: Any
) -> None:
    expected = [list(part) for part in open_corpus(large, tmp_path / "state").share()]
    path = kept(tmp_path) / name
    path.write_bytes(damage(path.read_bytes()))
    assert [list(part) for part in open_corpus(large, tmp_path / "state").share()] == expected


def test_file_changed_while_read_is_refused(tmp_path: Path, large: TextSource) -> None:
    own, _ = open_corpus(large, tmp_path / "state").share()
    Path(large.files[0].path).write_text("something else\n\nentirely")
    with pytest.raises(EspalierError, match="changed while it was read"):
        list(own)


def test_index_is_reused_and_made_only_once(
    tmp_path: Path, large: TextSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    make = corpus_index._build
    monkeypatch.setattr(corpus_index, "_build", lambda *given: (made.append(given), make(*given)))
    threads = [
        threading.Thread(target=open_corpus, args=(large, tmp_path / "state")) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1


def test_it_is_removed_like_private_state(tmp_path: Path, large: TextSource) -> None:
    open_corpus(large, tmp_path / "state")
    lock = kept(tmp_path) / "lock"
    collect_old_runs(tmp_path / "state", lock.stat().st_mtime - 1)
    assert lock.exists()
    os.utime(lock, (1, 1))
    # This use makes the index recent again.
    open_corpus(large, tmp_path / "state")
    collect_old_runs(tmp_path / "state", 2)
    assert lock.exists()
    os.utime(lock, (1, 1))
    collect_old_runs(tmp_path / "state", 2)
    assert not lock.exists()


def test_a_malformed_line_is_told_as_before(tmp_path: Path, kept_on_disk: None) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n{"text": 1}\n')
    data = DataSettings(source="files", path=str(path))
    for _ in range(2):
        with pytest.raises(EspalierError, match=r"a\.jsonl: line 2, field 'text' is not a string"):
            client_passages(data, node(tmp_path), 0, 2)
