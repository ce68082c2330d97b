"""Cache of the token ids that a process made last, for its next message.

A client trains on the same text in every round, and to read and encode it can take longer than the
round's steps. Each thread caches the token ids that it used last, of up to ``MOST_TOKENS`` tokens,
and at least one value. They are used again while the files do not change.

With ``keep-model = false`` a node caches nothing.
"""

import threading
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from espalier.data.files.corpus_index import Indexed

MOST_TOKENS = 1 << 25
"""Maximum number of cached tokens."""

T = TypeVar("T")

_SHELF = threading.local()


def cached_tokens(key: Hashable, make: Callable[[], tuple[T, int]]) -> T:
    """Return the value that was cached under a key, or make and cache it.

    Parameters
    ----------
    key : everything that determines the value
    make : function that returns the value and its number of tokens
    """
    values: dict[Hashable, tuple[Any, int]] = vars(_SHELF).setdefault("values", {})
    # The value that was used last leaves last.
    values[key] = values.pop(key) if key in values else make()
    while len(values) > 1 and sum(tokens for _, tokens in values.values()) > MOST_TOKENS:
        del values[next(iter(values))]
    value: T = values[key][0]
    return value


def forget_tokens() -> None:
    """Free the token ids that this thread caches."""
    vars(_SHELF).pop("values", None)


def state_of(units: Indexed[Any]) -> Hashable:
    """Return what determines some units of files, apart from settings of the run."""
    source = units.corpus.source
    files = tuple((file.identity(), *file.state()) for file in source.files)
    return (*source.reading(), files, units.sha256)
