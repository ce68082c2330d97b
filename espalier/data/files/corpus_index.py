"""Index of the passages in a client's file, so that a client reads only its own passages.

A file is read once, in blocks. The index has one row per passage: hashes, the position of its
record in the file, and the record's label. The rows are enough to compute the partition and the
held-out split. For a large file they are stored in ``<state-dir>/corpora`` and used by all clients
of this machine and all later runs, until the file changes.

Covers: other users of the machine cannot read the index (owner-only permissions); two processes do
not write at the same time (a lock); changes of the file and damage of the rows are detected, and
the file is read again. The index holds hashes and positions of passages, numbers of tokens and
labels of records, but no text. A person who guesses a passage can confirm the guess with its hash.
An index that was not used for ``keep-days`` is removed, as private state is.
Does not cover: a file that changes while it is read. The change is reported as an error.
"""

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

from espalier.data.files.files import Located, json_record, json_records, text_record, text_records
from espalier.data.partition import Partition, point_of
from espalier.data.passages import digest, digests_are_held_out, passages
from espalier.environment.bounded_json import read_json
from espalier.environment.paths import at_home
from espalier.errors import EspalierError, InputError
from espalier.storage.atomic import replacing, write_json
from espalier.storage.client_state import VERSION_FILE, marked_folder
from espalier.storage.directory_lock import LOCK, OWNER_ONLY_FILE, in_turn

LARGE_BYTES = 1 << 24
"""File size from which rows are stored on disk; rows of smaller files are computed on demand."""
INDEX_VERSION = 2
"""Version of the on-disk format of the index."""
ROWS_AT_ONCE = 1 << 14
"""Maximum number of rows that are read at a time."""
SORTED_AT_ONCE = 1 << 19
"""Approximate number of hashes that are sorted at a time when duplicates are removed."""

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
"""Format of a row.

``digest`` is the SHA-256 of the passage. ``point`` is the partition point of its record. ``start``
and ``length`` are the record's bytes in the file. ``place`` is the passage's number within the
record, and ``label`` the index of the record's label.
"""
_PACKED = struct.Struct("<32s8sQQII")

Rows = NDArray[Any]
"""Array of ``ROW``."""
Numbers = NDArray[np.int64]
"""Row numbers."""


@dataclass(frozen=True)
class Source:
    """File of records."""

    path: str
    file_format: str
    """Format of the file, ``text`` or ``jsonl``."""
    field: str = ""
    label_field: str = ""

    def located(self) -> Iterator[Located]:
        """Yield all records with their positions in the file."""
        if self.file_format == "jsonl":
            return json_records(self.path, self.field, self.label_field)
        return text_records(self.path)

    def passages_in(self, data: bytes) -> list[str]:
        """Return the passages of one record, given its bytes."""
        if self.file_format == "jsonl":
            return list(passages(json_record(data, self.field, self.label_field, self.path).text))
        return list(passages(text_record(data).text))

    def state(self) -> dict[str, int]:
        """Return size, inode and times of the file, which reveal a change."""
        found = at_home(self.path).stat()
        return {
            "size": found.st_size,
            "inode": found.st_ino,
            "written": found.st_mtime_ns,
            "changed": found.st_ctime_ns,
        }

    def changed(self) -> EspalierError:
        """Return the error for a file that changed after it was first read."""
        return InputError(
            f"{self.path}: the file changed while it was read; start the run again when the file"
            " is complete"
        )


class CorpusIndex:
    """Index rows of one file.

    Parameters
    ----------
    source : the file
    labels : distinct labels of the records
    rows : rows in file order, in memory or as an open file
    folder : folder for results that are stored with the index; None: nothing is stored
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
        """Return up to ``number`` rows, starting at row ``first``."""
        if isinstance(self._rows, np.ndarray):
            return self._rows[first : first + number]
        data = os.pread(self._rows.fileno(), number * ROW.itemsize, first * ROW.itemsize)
        return np.frombuffer(data, dtype=ROW)

    def share(
        self, deal: Partition | None = None, client: int = 0
    ) -> tuple["IndexedPassages", "IndexedPassages"]:
        """Return the passages of one client, for calibration and held out.

        Each passage appears once, in order of its first occurrence, as in ``passages.split``.

        Parameters
        ----------
        deal : partition of the records among clients; None: all records belong to the client
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
        """Yield the rows with the given ascending numbers, in batches."""
        place = 0
        while place < len(numbers):
            first = int(numbers[place])
            end = int(np.searchsorted(numbers, first + ROWS_AT_ONCE))
            yield self.rows(first, ROWS_AT_ONCE)[numbers[place:end] - first]
            place = end

    def _each_once(self, numbers: Numbers) -> Numbers:
        """Drop every row whose hash occurred in an earlier row.

        The hashes are sorted in parts, so that memory stays bounded.
        """
        parts = 1 + len(numbers) // SORTED_AT_ONCE
        repeated = np.zeros(len(numbers), dtype=bool)
        for part in range(parts):
            places = []
            digests = []
            place = 0
            for rows in self.chosen(numbers):
                # Equal hashes fall into the same part.
                here = np.flatnonzero(rows["digest"][:, 3] % parts == part)
                places.append(place + here)
                digests.append(rows["digest"][here].astype("u8"))
                place += len(rows)
            if not places:
                continue
            where = np.concatenate(places)
            all_digests = np.concatenate(digests)
            # ``lexsort`` is stable: the first of equal hashes stays first and is kept.
            order = np.lexsort(all_digests.T)
            same = (all_digests[order[1:]] == all_digests[order[:-1]]).all(axis=1)
            repeated[where[order[1:][same]]] = True
        return numbers[~repeated]


class IndexedPassages(Sequence[str]):
    """Passages given by their rows; each passage is read from the file on access."""

    def __init__(self, corpus: CorpusIndex, numbers: Numbers) -> None:
        self.corpus = corpus
        self.numbers = numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, place: Any) -> Any:
        """Return one passage, or the passages of a slice."""
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
        """SHA-256 of the row numbers, which identifies these passages within the file."""
        return hashlib.sha256(self.numbers.tobytes()).hexdigest()

    def load(self, name: str) -> Any:
        """Return the value that ``keep`` stored under this name, or None if there is none."""
        if (folder := self.corpus.folder) is None:
            return None
        with suppress(OSError, ValueError, KeyError, TypeError):
            document = read_json((folder / f"{name}-{self.sha256[:32]}.json").read_text())
            if document["sha256"] == _sha256_of(document["value"]):
                return document["value"]
        return None

    def keep(self, name: str, value: Any) -> None:
        """Store a value for these passages together with the index, if the index is on disk."""
        if (folder := self.corpus.folder) is not None:
            document = {"sha256": _sha256_of(value), "value": value}
            write_json(folder / f"{name}-{self.sha256[:32]}.json", document, OWNER_ONLY_FILE)


def _sha256_of(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def _passages_at(source: Source, file: BinaryIO, start: int, length: int) -> list[str]:
    try:
        return source.passages_in(os.pread(file.fileno(), length, start))
    except (EspalierError, ValueError):
        # The file was replaced. The error must not describe content that the index does not know.
        raise source.changed() from None


def open_corpus(source: Source, root: Path) -> CorpusIndex:
    """Return the index of a file; build it if there is none or the file has changed.

    Parameters
    ----------
    root : the node's ``state-dir``

    Raises
    ------
    InputError
        The file is missing, empty or malformed, or changes while it is read; or nothing can be
        written below ``root``.
    """
    try:
        state = source.state()
    except OSError:
        # The file cannot be opened; the read below raises the error that says why.
        state = {"size": 0}
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
    """Yield the packed rows of all passages, and collect the records' labels in ``labels``."""
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
    """Hold the lock of a file's index folder, and yield the folder."""
    path = os.path.realpath(at_home(source.path))
    name = hashlib.sha256(
        json.dumps([path, source.file_format, source.field, source.label_field]).encode()
    ).hexdigest()[:32]
    folder = marked_folder(root, "corpora", name)
    with in_turn(folder):
        yield folder


def _kept(source: Source, folder: Path, state: dict[str, int]) -> CorpusIndex | None:
    """Return the stored index of a file in this state, or None if it is missing or damaged."""
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
    """Read a file and store its rows, then the document that names them.

    The order matters: after an interruption, incomplete rows have no document and are not used.
    """
    for old in (path for path in folder.iterdir() if path.name not in (LOCK, VERSION_FILE)):
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
