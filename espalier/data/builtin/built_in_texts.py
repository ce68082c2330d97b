"""Built-in texts, which every Python installation has: each client's source and the public part."""

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Protocol

from espalier.data.builtin import documentation, source_code
from espalier.data.partition import Partition
from espalier.data.passages import passages, split


class BuiltIn(Protocol):
    """Module with texts of several sources."""

    SOURCES: tuple[str, ...]

    def texts(self, source: str) -> Iterator[str]:
        """Yield the texts of one source."""


BUILT_IN: Mapping[str, BuiltIn] = {"documentation": documentation, "code": source_code}
"""Built-in texts by their names in ``data.source`` and ``evaluation.texts``."""


def own_passages(name: str, client: int, num_clients: int) -> list[str]:
    """Return the passages of a client's source of a built-in text.

    Clients with the same source divide its passages among them.
    """
    text = BUILT_IN[name]
    rank, source = divmod(client, len(text.SOURCES))
    # Number of clients that have this source: every ``len(text.SOURCES)``-th, rounded up.
    sharers = -(-(num_clients - source) // len(text.SOURCES))
    whole = [passage for one in text.texts(text.SOURCES[source]) for passage in passages(one)]
    return Partition("iid", sharers, 1.0, 0).select(rank, whole)


@cache
def public_part(name: str) -> str:
    """Return the held-out passages of all sources, which no client calibrates or trains on.

    A process reads them once, because removing the docstrings of all sources takes seconds.
    """
    text = BUILT_IN[name]
    _, held_out = split(one for source in text.SOURCES for one in text.texts(source))
    return "\n\n".join(held_out)
