"""Partition of records one by one, without arrays, to compare with ``Partition.chooser``."""

from collections.abc import Iterable
from itertools import pairwise

from espalier.data.files.records import Record
from espalier.data.partition import Partition
from espalier.data.passages import digest


def share_of(partition: Partition, client: int, records: Iterable[Record]) -> list[Record]:
    """Return the records of one client, in their order."""
    records = list(records)
    labels = sorted({record.label for record in records})
    if partition.kind in ("by-field", "by-group"):
        return [one for one in records if labels.index(one.label) % partition.num_clients == client]
    intervals = {
        label: [*pairwise([0.0, *partition._ends(label).tolist()])][client] for label in labels
    }
    return [one for one in records if _within(one, *intervals[one.label])]


def _within(record: Record, start: float, end: float) -> bool:
    return start <= int.from_bytes(digest(record.text)[8:16], "big") / 2**64 < end
