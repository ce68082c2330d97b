"""Check of a site's own file before the site takes part in a run.

Covers: a file that cannot be read, or has too little data, is reported when the site first hears of
a run and not in the first round. Only the beginning of a large file is read, so the cost does not
depend on the size of the file; with ``min-groups`` it is read whole.
Does not cover: errors further on in a large file.
"""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import chain, islice

import numpy as np

from espalier.data.client_items import client_items, mapped_columns
from espalier.data.client_text import (
    client_samples,
    group_field,
    site_texts,
    split_passages,
    training_samples,
)
from espalier.data.data_protection import redacted_errors, require_own_data, require_tokens
from espalier.data.files.files import CLIENT_KEYS
from espalier.data.files.formats import open_rows
from espalier.data.passages import digests_are_held_out, split
from espalier.data.privacy_units import record_sequences
from espalier.data.samples import Encode
from espalier.data.tasks.catalogue import task_of
from espalier.data.tasks.task_source import items_in
from espalier.errors import EspalierError
from espalier.settings.node import NodeSettings
from espalier.settings.run import RunSettings
from espalier.settings.tables.evaluation import BUILT_IN_TEXTS
from espalier.settings.tables.task import TEXT

LARGE = 4 * 1024 * 1024
"""File size in bytes above which only the beginning is read."""

FIRST_ITEMS = 1000
"""Number of items of a large file that are read."""

ANY_CLIENT = 0
"""Placeholder for the client's number, which is not known yet.

A site's own file does not depend on it.
"""


def require_enough(settings: RunSettings, node: NodeSettings, encode: Encode) -> None:
    """Refuse a run that the site's ``data-path`` cannot serve, with the error of the first round.

    A site without its own file is not checked if the run names data or a built-in text, because
    that data depends on the client's number. Raises InputError if neither site nor run names a
    file, the file cannot be read, or it has too little data.
    """
    tunes = settings.tunes
    data = settings.data
    on_items = tunes and settings.task.name != TEXT
    of_the_run = node.simulated and bool(data.path or data.origin == "hub")
    if not node.data_path and (of_the_run or (data.origin in BUILT_IN_TEXTS and not on_items)):
        return
    if settings.privacy.on and not on_items:
        record_sequences(settings, node, encode, ANY_CLIENT)
        return
    # Groups are counted in the whole file.
    if _size(node.data_path) > LARGE and not node.fewest_groups():
        # The full read below raises the error again.
        with suppress(EspalierError):
            if (
                _begins_with_items(settings, node)
                if on_items
                else _begins_with_samples(settings, node, encode, tunes)
            ):
                return
    if on_items:
        client_items(settings, node, ANY_CLIENT)
    elif tunes:
        training_samples(settings, node, encode, ANY_CLIENT)
    else:
        client_samples(settings, node, encode, ANY_CLIENT)


@redacted_errors
def require_readable(settings: RunSettings, node: NodeSettings) -> None:
    """Refuse a run that the site's ``data-path`` cannot serve, before a tokenizer is available.

    Raises InputError if the file cannot be read, or has nothing to train on.
    """
    on_items = settings.tunes and settings.task.name != TEXT
    require_own_data(node, settings.data, settings.task.name if on_items else TEXT)
    if not node.data_path:
        return
    if on_items:
        if (
            _size(node.data_path) <= LARGE
            or node.fewest_groups()
            or not _begins_with_items(settings, node)
        ):
            client_items(settings, node, ANY_CLIENT)
    elif node.fewest_groups():
        split_passages(settings, node, ANY_CLIENT)
    else:
        # Reading the first record reports a missing or empty file.
        next(site_texts(settings.data, node), None)


def _size(path: str) -> int:
    """Return the size of the files that a path names, in bytes."""
    try:
        return sum(file.num_bytes() for file in open_rows(path, CLIENT_KEYS))
    except (OSError, EspalierError):
        # Reading the files raises the error.
        return 0


def _begins_with_items(settings: RunSettings, node: NodeSettings) -> bool:
    task = task_of(settings)
    data = settings.data
    require_own_data(node, data, task.name)
    columns = mapped_columns(settings, node, task)
    source = items_in(task, node.data_path, columns_of=columns)
    source = replace(source, group_field=group_field(data, node))
    rows = chain.from_iterable(file.rows() for file in source.files)
    units = (unit for row in islice(rows, FIRST_ITEMS) for unit in source.units(row))
    sides = [int.from_bytes(unit.side[:8], "big") for unit in units]
    # A client needs one item that is not held out.
    return not digests_are_held_out(np.array(sides, np.uint64)).all()


def _begins_with_samples(
    settings: RunSettings, node: NodeSettings, encode: Encode, tunes: bool
) -> bool:
    """Return whether the file's beginning has as many samples as the run needs.

    A token has at least one character, so the search starts with as many characters as tokens.
    """
    require_own_data(node, settings.data)
    num_tokens = settings.data.sequence_length * (
        1 if tunes else node.num_samples or settings.data.num_samples
    )
    if not tunes:
        require_tokens(
            node,
            num_tokens,
            "raise data.num-samples or data.sequence-length, or the site's samples",
        )
    for texts in _beginnings(site_texts(settings.data, node), num_tokens):
        own, _ = split(texts)
        if len(encode("\n\n".join(own))) >= num_tokens:
            return True
    return False


def _beginnings(texts: Iterable[str], characters: int) -> Iterator[list[str]]:
    """Yield growing lists of the first texts, each with at least twice as many characters."""
    taken: list[str] = []
    size = 0
    for text in texts:
        taken.append(text)
        size += len(text)
        if size >= characters:
            yield taken
            characters = 2 * size
    yield taken
