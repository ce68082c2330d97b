"""Index of the passages or items in a client's files, so that a client reads only its own.

Files are read once, in blocks. The index has one row per passage or item (``Unit``): hashes, the
position of its record in the file, and the record's label. The rows are enough to compute the
partition and the held-out split. For a large file they are stored in ``<state-dir>/corpora`` and
used by all clients of this machine and all later runs, until the file changes.

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
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, groupby
from pathlib import Path
from typing import Any, BinaryIO, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from espalier.data.files.rows import Place, Row, RowFile
from espalier.data.flower_partition import FlowerPartition
from espalier.data.partition import Partition, point_of
from espalier.data.passages import digests_are_held_out
from espalier.environment.bounded_json import read_json
from espalier.errors import EspalierError
from espalier.storage.atomic import replacing, write_json
from espalier.storage.client_state import VERSION_FILE, marked_folder, private_folder
from espalier.storage.directory_lock import LOCK, OWNER_ONLY_FILE, in_turn

DOCUMENT = "index.json"
"""Name of the file that makes a stored index valid."""
LARGE_BYTES = 1 << 24
"""File size from which rows are stored on disk; rows of smaller files are computed on demand."""
INDEX_VERSION = 3
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
        ("side", ">u8"),
        ("file", "<u4"),
        ("place", "<u4"),
        ("label", "<u4"),
    ]
)
"""Format of a row.

``digest`` is the hash of the unit, ``point`` its partition point, and ``side`` decides whether it
is held out (see ``Unit``). ``start`` and ``length`` are the record's place in its file
(``rows.Place``), and ``file`` the file's number. ``place`` is the unit's number within the record,
and ``label`` the index of its label.
"""
# The bytes of a ``ROW``. Hashes keep their byte order, therefore ``>u8`` above.
_PACKED = struct.Struct("<32s8sQQ8sIII")

Rows = NDArray[Any]
"""Array of ``ROW``."""
Numbers = NDArray[np.int64]
"""Row numbers."""


T = TypeVar("T", covariant=True)


@dataclass(frozen=True)
class Unit(Generic[T]):
    """Smallest part of a source that belongs to one client, and to one side of its split.

    Hashes are SHA-256.
    """

    value: T
    """Passage of a text, or item of a task."""
    digest: bytes
    """Hash of the unit; equal units of a client count once."""
    owner: bytes
    """Hash that decides which client has the unit."""
    side: bytes
    """Hash that decides whether the unit is held out."""
    label: str = ""
    """Label for a partition by labels."""


class Source(Protocol[T]):
    """Files of records, and the units that a record has."""

    @property
    def files(self) -> Sequence[RowFile]:
        """Files, in order."""

    @property
    def columns(self) -> Sequence[str]:
        """Fields that are read; empty: all."""

    def units(self, row: Row) -> Iterable[Unit[T]]:
        """Return the units of a record.

        Raises InputError if a field is missing or wrong.
        """

    def reading(self) -> list[str]:
        """Return what determines the units of a record, for the name of the index."""


class CorpusIndex(Generic[T]):
    """Index rows of some files.

    Parameters
    ----------
    source : the files
    labels : distinct labels of the units
    rows : rows in file order, in memory or as an open file
    folder : folder for results that are stored with the index; None: nothing is stored
    """

    def __init__(
        self,
        source: Source[T],
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

    def forget(self) -> None:
        """Remove the stored index, so that the next ``open_corpus`` builds it again."""
        if self.folder is not None:
            (self.folder / DOCUMENT).unlink(missing_ok=True)

    def rows(self, first: int, number: int) -> Rows:
        """Return up to ``number`` rows, starting at row ``first``."""
        if isinstance(self._rows, np.ndarray):
            return self._rows[first : first + number]
        data = os.pread(self._rows.fileno(), number * ROW.itemsize, first * ROW.itemsize)
        return np.frombuffer(data, dtype=ROW)

    def share(
        self,
        partition: Partition | FlowerPartition | None = None,
        client: int = 0,
        *,
        distinct: bool = True,
        never_empty: bool = False,
    ) -> tuple["Indexed[T]", "Indexed[T]"]:
        """Return the units of one client, to be used and held out.

        Each unit appears once, in order of its first occurrence, as in ``passages.split``.

        Parameters
        ----------
        partition : partition of the records among clients; None: all records belong to the client
        distinct : False keeps repeated units, so that what a record contributes does not depend on
            the others
        never_empty : True holds nothing out if nothing else would be left to use
        """
        if isinstance(partition, FlowerPartition):
            return self._split(self._by_records(partition, client), distinct, never_empty)
        is_mine = partition.chooser(client, self.labels) if partition else None
        numbers: list[Numbers] = []
        for first in range(0, len(self), ROWS_AT_ONCE):
            rows = self.rows(first, ROWS_AT_ONCE)
            mine = (
                np.arange(len(rows))
                if is_mine is None
                else np.flatnonzero(is_mine(rows["point"].astype("u8"), rows["label"]))
            )
            numbers.append(first + mine)
        own = np.concatenate(numbers) if numbers else np.empty(0, np.int64)
        return self._split(own, distinct, never_empty)

    def _by_records(self, partition: FlowerPartition, client: int) -> Numbers:
        """Return the numbers of a client's rows; all rows of a record belong to one client."""
        labels = np.empty(len(self), np.uint32)
        begins = np.empty(len(self), bool)
        # A place that no record has.
        last = np.full((3, 1), np.iinfo(np.uint64).max)
        for first in range(0, len(self), ROWS_AT_ONCE):
            rows = self.rows(first, ROWS_AT_ONCE)
            places = np.stack([rows[name].astype("u8") for name in ("file", "start", "length")])
            here = slice(first, first + len(rows))
            labels[here] = rows["label"]
            # A row begins a record if its place differs from that of the row before.
            begins[here] = (places != np.hstack([last, places[:, :-1]])).any(axis=0)
            last = places[:, -1:]
        # (rows,): number of each row's record.
        records = np.cumsum(begins) - 1
        mine = np.zeros(int(begins.sum()), bool)
        mine[partition.records_of(client, labels[begins], self.labels)] = True
        return np.flatnonzero(mine[records])

    def _split(
        self, numbers: Numbers, distinct: bool, never_empty: bool
    ) -> tuple["Indexed[T]", "Indexed[T]"]:
        """Return the units of some rows, with ``distinct`` each once, to be used and held out."""
        own = self._each_once(numbers) if distinct else numbers
        held_out = np.concatenate(
            [digests_are_held_out(rows["side"]) for rows in self.chosen(own)] or [np.empty(0, bool)]
        )
        if never_empty and held_out.all():
            held_out[:] = False
        return Indexed(self, own[~held_out]), Indexed(self, own[held_out])

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


class Indexed(Sequence[T]):
    """Units given by their index rows; each is read from its file on access."""

    def __init__(self, corpus: CorpusIndex[T], numbers: Numbers) -> None:
        self.corpus = corpus
        self.numbers = numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, place: Any) -> Any:
        """Return one unit, or the units of a slice."""
        if isinstance(place, slice):
            return Indexed(self.corpus, self.numbers[place])
        (unit,) = Indexed(self.corpus, self.numbers[[place]])
        return unit

    def __iter__(self) -> Iterator[T]:
        rows = chain.from_iterable(self.corpus.chosen(self.numbers))
        for number, of_file in groupby(rows, key=lambda row: int(row["file"])):
            yield from self._of_file(self.corpus.source.files[number], of_file)

    def _of_file(self, file: RowFile, rows: Iterable[Any]) -> Iterator[T]:
        """Yield the units of some index rows of one file."""
        source = self.corpus.source
        waiting = deque[tuple[Place, list[Any]]]()

        def places() -> Iterator[Place]:
            for place, of_record in groupby(
                rows, lambda row: (int(row["start"]), int(row["length"]))
            ):
                waiting.append((place, list(of_record)))
                yield place

        # ``file.at`` reads some places ahead, so the units of each wait in a queue.
        for record in file.at(places(), source.columns):
            place, units = waiting.popleft()
            # Lines have a first byte and a length, rows of tables a number.
            where = f"byte {place[0] + 1}" if place[1] else f"row {place[0] + 1}"
            try:
                candidates = list(source.units(Row(place, f"{file.path}: {where}", record)))
            except EspalierError:
                # The file was replaced. The error must not describe content that nobody checked.
                raise file.changed() from None
            for row in units:
                within = int(row["place"])
                if (
                    within >= len(candidates)
                    or candidates[within].digest != row["digest"].tobytes()
                ):
                    # The next start builds the index again, whatever the reason.
                    self.corpus.forget()
                    raise file.changed()
                yield candidates[within].value

    @property
    def label_numbers(self) -> NDArray[np.uint32]:
        """Number of each unit's label, or of its group if records have groups: (units,)."""
        found = [rows["label"] for rows in self.corpus.chosen(self.numbers)]
        return np.concatenate([np.empty(0, np.uint32), *found])

    @property
    def record_numbers(self) -> NDArray[np.int64]:
        """Number of each unit's record among the records of these units: (units,)."""
        places = [
            np.stack([rows[name].astype("u8") for name in ("file", "start", "length")], axis=1)
            for rows in self.corpus.chosen(self.numbers)
        ]
        found = np.concatenate([np.empty((0, 3), np.uint64), *places])
        numbers: NDArray[np.int64] = np.unique(found, axis=0, return_inverse=True)[1].reshape(-1)
        return numbers

    @cached_property
    def sha256(self) -> str:
        """SHA-256 of the row numbers, which identifies these units within the files."""
        return hashlib.sha256(self.numbers.tobytes()).hexdigest()

    def load(self, name: str) -> Any:
        """Return the value that ``keep`` stored under this name, or None if there is none."""
        if (folder := self.corpus.folder) is None:
            return None
        # A document that is missing or damaged is computed again.
        with suppress(OSError, ValueError, KeyError, TypeError):
            document = read_json((folder / f"{name}-{self.sha256[:32]}.json").read_text())
            if document["sha256"] == _sha256_of(document["value"]):
                return document["value"]
        return None

    def keep(self, name: str, value: Any) -> None:
        """Store a value for these units together with the index, if the index is on disk."""
        if (folder := self.corpus.folder) is not None:
            document = {"sha256": _sha256_of(value), "value": value}
            write_json(folder / f"{name}-{self.sha256[:32]}.json", document, OWNER_ONLY_FILE)


def _sha256_of(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def open_corpus(source: Source[T], root: Path) -> CorpusIndex[T]:
    """Return the index of some files; build it if there is none or a file has changed.

    Parameters
    ----------
    root : the node's ``state-dir``

    Raises
    ------
    InputError
        A file is missing, empty or malformed, or changes while it is read; or nothing can be
        written below ``root``.
    """
    try:
        state = _state(source)
        size = sum(file.num_bytes() for file in source.files)
    except OSError:
        # A file cannot be opened; the read below raises the error that says why.
        size = 0
    if size < LARGE_BYTES:
        labels: dict[str, int] = {}
        rows = np.frombuffer(b"".join(_packed(source, labels)), dtype=ROW)
        return CorpusIndex(source, list(labels), rows)
    with _locked(source, root) as folder:
        index = _stored(source, folder, state)
        if index is None:
            _build(source, folder, state)
            # With the state of now: files that changed while they were read have no index.
            index = _stored(source, folder, _state(source))
        if index is None:
            raise source.files[0].changed()
        return index


def _state(source: Source[Any]) -> list[list[int]]:
    """Return the properties of the files that reveal a change."""
    return [file.state() for file in source.files]


def _packed(source: Source[Any], labels: dict[str, int]) -> Iterator[bytes]:
    """Yield the packed rows of all units, and collect their labels in ``labels``."""
    row = None
    for number, file in enumerate(source.files):
        for row in file.rows(source.columns):
            for place, unit in enumerate(source.units(row)):
                label = labels.setdefault(unit.label, len(labels))
                point = point_of(unit.owner).to_bytes(8, "big")
                yield _PACKED.pack(
                    unit.digest, point, *row.place, unit.side[:8], number, place, label
                )
    # Each file of many may be empty, but not all of them.
    if row is None and source.files:
        raise source.files[0].empty()


@contextmanager
def _locked(source: Source[Any], root: Path) -> Iterator[Path]:
    """Hold the lock of a file's index folder, and yield the folder."""
    paths = [file.identity() for file in source.files]
    name = hashlib.sha256(json.dumps([paths, source.reading()]).encode()).hexdigest()[:32]
    with in_turn(private_folder(root, "corpora", name)):
        # Marked behind the lock: the holder removes all unfinished files.
        yield marked_folder(root, "corpora", name)


def _stored(source: Source[T], folder: Path, state: list[list[int]]) -> CorpusIndex[T] | None:
    """Return the stored index of a file in this state, or None if it is missing or damaged."""
    try:
        document = read_json((folder / DOCUMENT).read_text())
        labels = document["labels"]
        expected = {"version": INDEX_VERSION, "files": state}
        rows = open(folder / "rows", "rb")  # noqa: SIM115, the index reads it as long as it lives
    except (OSError, ValueError, KeyError, TypeError):
        return None
    whole = hashlib.file_digest(rows, "sha256").hexdigest() == document.get("sha256")
    if not whole or {key: document.get(key) for key in expected} != expected:
        rows.close()
        return None
    return CorpusIndex(source, labels, rows, folder)


def _build(source: Source[T], folder: Path, state: list[list[int]]) -> None:
    """Read a file and store its rows, then the document that names them.

    The order matters: after an interruption, incomplete rows have no document and are not used.
    """
    for old in (path for path in folder.iterdir() if path.name not in (LOCK, VERSION_FILE)):
        old.unlink()
    labels = dict[str, int]()
    sha256 = hashlib.sha256()
    with replacing(folder / "rows", OWNER_ONLY_FILE) as file:
        for row in _packed(source, labels):
            sha256.update(row)
            file.write(row)
    if _state(source) != state:
        raise source.files[0].changed()
    document = {
        "version": INDEX_VERSION,
        "files": state,
        "sha256": sha256.hexdigest(),
        "labels": list(labels),
    }
    write_json(folder / DOCUMENT, document, OWNER_ONLY_FILE)
