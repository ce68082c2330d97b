"""Where each passage of a client's file stands, so that a client reads its own passages and no others.

A file is read once, in blocks, and of every passage a row is kept: hashes, where its record stands, and the record's label.
From the rows alone follow the partition and the held-out part. Of a large file they are kept in ``<state-dir>/corpora``, for
all clients of this machine and all later runs, until the file changes.

Covers: other users of the machine cannot read what is kept (owner-only permissions); two processes do not write at once (a
lock); a file that was changed, and rows that were damaged, are noticed, and the file is read again. What is kept are hashes and
places of passages, numbers of tokens, and labels of records, but no text; who guesses a passage can confirm the guess. It is
removed like private state that nobody touched for ``keep-days``.
Does not cover: a file that is changed while it is read, beyond saying so.
"""

import fcntl
import hashlib
import json
import os
import struct
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from espalier.corpora.files import Located, json_record, json_records, text_record, text_records
from espalier.corpora.partition import Partition, point_of
from espalier.corpora.passages import digest, digests_are_held_out, passages
from espalier.settings.bounded_json import read_json
from espalier.settings.home import at_home
from espalier.settings.mistakes import Mistake
from espalier.storage.atomic import replacing, write_json
from espalier.storage.private import (
    OWNER_ONLY_FILE,
    VERSION_FILE,
    is_ours,
    mark_as_ours,
    private_folder,
)

LARGE_BYTES = 1 << 24
"""Rows of a file of this size are kept on disk; those of a smaller one are made whenever they are needed."""
INDEX_VERSION = 2
"""Of the files in which rows are kept."""
ROWS_AT_ONCE = 1 << 14
SORTED_AT_ONCE = 1 << 19

ROW = np.dtype(
    [
        ("digest", ">u8", (4,)),
        ("point", ">u8"),
        ("start", "<u8"),
        ("length", "<u8"),
        ("place", "<u4"),
        ("label", "<u4"),
    ]
)
"""A passage: its hash; of its record the point by which it is dealt out, the bytes of the file, and the place of its label; and
which passage of the record it is."""
_PACKED = struct.Struct("<32s8sQQII")

Rows = NDArray[Any]
"""Of ``ROW``."""
Numbers = NDArray[np.int64]
"""Numbers of rows."""


@dataclass(frozen=True)
class Source:
    """A file of records."""

    path: str
    file_format: str
    """``text`` or ``jsonl``."""
    field: str = ""
    label_field: str = ""

    def located(self) -> Iterator[Located]:
        """All records."""
        if self.file_format == "jsonl":
            return json_records(self.path, self.field, self.label_field)
        return text_records(self.path)

    def passages_in(self, data: bytes) -> list[str]:
        """The passages of one record, by its bytes."""
        if self.file_format == "jsonl":
            return list(passages(json_record(data, self.field, self.label_field, self.path).text))
        return list(passages(text_record(data).text))

    def state(self) -> dict[str, int]:
        """By what a change of the file is noticed."""
        found = at_home(self.path).stat()
        return {
            "size": found.st_size,
            "inode": found.st_ino,
            "written": found.st_mtime_ns,
            "changed": found.st_ctime_ns,
        }

    def changed(self) -> Mistake:
        """The error of a file that is not what it was when it was read first."""
        return Mistake(
            f"{self.path}: the file was changed while it was read; start the run again when it is"
            " complete"
        )


class CorpusIndex:
    """The rows of one file.

    Parameters
    ----------
    source : the file
    labels : of its records, each once
    rows : in the order of the file: in memory, or a file of them
    folder : where what is learnt of the file is kept; None: nowhere
    """

    def __init__(
        self,
        source: Source,
        labels: Sequence[str],
        rows: Rows | BinaryIO,
        folder: Path | None = None,
    ) -> None:
        self.source = source
        self.labels = labels
        self.folder = folder
        self._rows = rows
        if not isinstance(rows, np.ndarray):
            weakref.finalize(self, rows.close)

    def __len__(self) -> int:
        if isinstance(self._rows, np.ndarray):
            return len(self._rows)
        return os.fstat(self._rows.fileno()).st_size // ROW.itemsize

    def rows(self, first: int, number: int) -> Rows:
        """At most ``number`` rows from ``first`` on."""
        if isinstance(self._rows, np.ndarray):
            return self._rows[first : first + number]
        data = os.pread(self._rows.fileno(), number * ROW.itemsize, first * ROW.itemsize)
        return np.frombuffer(data, dtype=ROW)

    def share(
        self, deal: Partition | None = None, client: int = 0
    ) -> tuple["IndexedPassages", "IndexedPassages"]:
        """Passages of one client, to calibrate on and held out: each once, in order of first occurrence, as ``passages.split``.

        Parameters
        ----------
        deal : how records are dealt out; None: all are the client's
        """
        is_mine = deal.chooser(client, self.labels) if deal else None
        found: list[Numbers] = []
        for first in range(0, len(self), ROWS_AT_ONCE):
            rows = self.rows(first, ROWS_AT_ONCE)
            mine = (
                np.arange(len(rows))
                if is_mine is None
                else np.flatnonzero(is_mine(rows["point"].astype("u8"), rows["label"]))
            )
            found.append(first + mine)
        own = self._each_once(np.concatenate(found) if found else np.empty(0, np.int64))
        held_out = np.concatenate(
            [digests_are_held_out(rows["digest"][:, 0]) for rows in self.chosen(own)]
            or [np.empty(0, bool)]
        )
        return IndexedPassages(self, own[~held_out]), IndexedPassages(self, own[held_out])

    def chosen(self, numbers: Numbers) -> Iterator[Rows]:
        """Some rows, a few at a time; their numbers ascend."""
        place = 0
        while place < len(numbers):
            first = int(numbers[place])
            end = int(np.searchsorted(numbers, first + ROWS_AT_ONCE))
            yield self.rows(first, ROWS_AT_ONCE)[numbers[place:end] - first]
            place = end

    def _each_once(self, numbers: Numbers) -> Numbers:
        """The first of all rows with the same hash; a part of the hashes is sorted at a time."""
        parts = 1 + len(numbers) // SORTED_AT_ONCE
        repeated = np.zeros(len(numbers), dtype=bool)
        for part in range(parts):
            places = []
            digests = []
            place = 0
            for rows in self.chosen(numbers):
                here = np.flatnonzero(rows["digest"][:, 3] % parts == part)
                places.append(place + here)
                digests.append(rows["digest"][here].astype("u8"))
                place += len(rows)
            if not places:
                continue
            where = np.concatenate(places)
            all_digests = np.concatenate(digests)
            order = np.lexsort(all_digests.T)  # stable: of equal ones the first stays first
            same = (all_digests[order[1:]] == all_digests[order[:-1]]).all(axis=1)
            repeated[where[order[1:][same]]] = True
        return numbers[~repeated]


class IndexedPassages(Sequence[str]):
    """Passages by their rows; each is read from the file when it is needed."""

    def __init__(self, corpus: CorpusIndex, numbers: Numbers) -> None:
        self.corpus = corpus
        self.numbers = numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, place: Any) -> Any:
        """One passage, or some that follow one another."""
        if isinstance(place, slice):
            return IndexedPassages(self.corpus, self.numbers[place])
        (passage,) = IndexedPassages(self.corpus, self.numbers[[place]])
        return passage

    def __iter__(self) -> Iterator[str]:
        source = self.corpus.source
        data = (-1, 0)
        found = list[str]()
        with open(at_home(source.path), "rb") as file:
            for rows in self.corpus.chosen(self.numbers):
                columns = (rows[name].tolist() for name in ("start", "length", "place"))
                digests = [row.tobytes() for row in rows["digest"]]
                for start, length, place, expected in zip(*columns, digests, strict=True):
                    if data != (start, length):
                        data = (start, length)
                        found = _passages_at(source, file, start, length)
                    if place >= len(found) or digest(found[place]) != expected:
                        raise source.changed()
                    yield found[place]

    @cached_property
    def sha256(self) -> str:
        """Names these passages of this file."""
        return hashlib.sha256(self.numbers.tobytes()).hexdigest()

    def load(self, name: str) -> Any:
        """What was kept of these passages by ``keep``; None where nothing was."""
        if (folder := self.corpus.folder) is None:
            return None
        with suppress(OSError, ValueError, KeyError, TypeError):
            document = read_json((folder / f"{name}-{self.sha256[:32]}.json").read_text())
            if document["sha256"] == _sha256_of(document["value"]):
                return document["value"]
        return None

    def keep(self, name: str, value: Any) -> None:
        """Keep what is known of these passages as long as the index, if it is kept."""
        if (folder := self.corpus.folder) is not None:
            document = {"sha256": _sha256_of(value), "value": value}
            write_json(folder / f"{name}-{self.sha256[:32]}.json", document, OWNER_ONLY_FILE)


def _sha256_of(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def _passages_at(source: Source, file: BinaryIO, start: int, length: int) -> list[str]:
    try:
        return source.passages_in(os.pread(file.fileno(), length, start))
    except (Mistake, ValueError):
        # Another file is there now; what it holds is none of the index's business.
        raise source.changed() from None


def open_corpus(source: Source, root: Path) -> CorpusIndex:
    """The index of a file; made anew if there is none, or the file is not what it was.

    Parameters
    ----------
    root : the node's ``state-dir``

    Raises
    ------
    Mistake
        The file is missing, empty or malformed, or changes meanwhile; or nothing can be written below ``root``.
    """
    try:
        state = source.state()
    except OSError:
        state = {"size": 0}  # reading it tells why
    if state["size"] < LARGE_BYTES:
        labels: dict[str, int] = {}
        rows = np.frombuffer(b"".join(_packed(source.located(), labels)), dtype=ROW)
        return CorpusIndex(source, list(labels), rows)
    with _locked(source, root) as folder:
        kept = _kept(source, folder, state)
        if kept is None:
            _make(source, folder, state)
            kept = _kept(source, folder, source.state())
        if kept is None:
            raise source.changed()
        return kept


def _packed(records: Iterable[Located], labels: dict[str, int]) -> Iterator[bytes]:
    """The rows of all passages; ``labels`` takes what the records are labelled with."""
    for located in records:
        text = located.record.text
        label = labels.setdefault(located.record.label, len(labels))
        of_record = digest(text)
        point = point_of(of_record).to_bytes(8, "big")
        for place, passage in enumerate(passages(text)):
            of_passage = of_record if passage == text else digest(passage)
            yield _PACKED.pack(of_passage, point, located.start, located.length, place, label)


@contextmanager
def _locked(source: Source, root: Path) -> Iterator[Path]:
    """The folder for what is known of a file, held by this process alone."""
    path = os.path.realpath(at_home(source.path))
    name = hashlib.sha256(
        json.dumps([path, source.file_format, source.field, source.label_field]).encode()
    ).hexdigest()[:32]
    folder = private_folder(root, "corpora", name)
    with open(os.open(folder / "lock", os.O_WRONLY | os.O_CREAT, OWNER_ONLY_FILE), "w") as file:
        os.utime(file.fileno())
        fcntl.flock(file, fcntl.LOCK_EX)
        if not is_ours(folder):
            mark_as_ours(folder)  # refuses what holds another program's files
        yield folder


def _kept(source: Source, folder: Path, state: dict[str, int]) -> CorpusIndex | None:
    """The index that was kept of a file in this state; None if there is none, or it is damaged."""
    try:
        document = read_json((folder / "index.json").read_text())
        labels = document["labels"]
        expected = {"version": INDEX_VERSION, "file": state}
        rows = open(folder / "rows", "rb")  # noqa: SIM115, the index reads it as long as it lives
    except (OSError, ValueError, KeyError, TypeError):
        return None
    whole = hashlib.file_digest(rows, "sha256").hexdigest() == document.get("sha256")
    if not whole or {key: document.get(key) for key in expected} != expected:
        rows.close()
        return None
    return CorpusIndex(source, labels, rows, folder)


def _make(source: Source, folder: Path, state: dict[str, int]) -> None:
    """Read a file, and keep its rows, then what names them, so that rows without a name are not taken for whole ones."""
    for old in (path for path in folder.iterdir() if path.name not in ("lock", VERSION_FILE)):
        old.unlink()
    labels = dict[str, int]()
    sha256 = hashlib.sha256()
    with replacing(folder / "rows", OWNER_ONLY_FILE) as file:
        for row in _packed(source.located(), labels):
            sha256.update(row)
            file.write(row)
    if source.state() != state:
        raise source.changed()
    document = {
        "version": INDEX_VERSION,
        "file": state,
        "sha256": sha256.hexdigest(),
        "labels": list(labels),
    }
    write_json(folder / "index.json", document, OWNER_ONLY_FILE)
