"""The texts that need no file, because every Python installation has them: who holds what of them, and what is public."""

from collections.abc import Iterator, Mapping
from typing import Protocol

from espalier.corpora import documentation, source_code
from espalier.corpora.partition import Partition
from espalier.corpora.passages import passages, split
from espalier.corpora.records import Record


class BuiltIn(Protocol):
    """A module with a text of several sources."""

    SOURCES: tuple[str, ...]

    def texts(self, source: str) -> Iterator[str]:
        """Texts of one source."""


BUILT_IN: Mapping[str, BuiltIn] = {"documentation": documentation, "code": source_code}
"""By their names in ``data.source`` and ``evaluation.texts``."""


def own_records(name: str, client: int, num_clients: int) -> list[Record]:
    """A client's source of a built-in text, by passages; clients that share a source share its passages out."""
    text = BUILT_IN[name]
    place = client % len(text.SOURCES)
    sharers = -(-(num_clients - place) // len(text.SOURCES))
    records = (
        Record(passage) for one in text.texts(text.SOURCES[place]) for passage in passages(one)
    )
    return Partition("iid", sharers, 1.0, 0).share_of(client // len(text.SOURCES), records)


def public_part(name: str) -> str:
    """The held-out passages of all sources of a built-in text, which no client trains or calibrates on."""
    text = BUILT_IN[name]
    _, held_out = split(one for source in text.SOURCES for one in text.texts(source))
    return "\n\n".join(held_out)
