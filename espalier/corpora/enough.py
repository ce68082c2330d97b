"""Whether a site's own file holds enough for a run, found out before the site takes part.

Covers: a file that cannot be read, or holds too little, is told when the site first hears of a run, not in its first round. Of
a large file only the beginning is read, so that it costs the same however much a site has.
Does not cover: what is wrong further on in a large file.
"""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import islice

from espalier.corpora.client_items import client_items
from espalier.corpora.client_text import client_windows, site_records, training_windows
from espalier.corpora.own_data import require_own_data, require_tokens, told_at_the_site
from espalier.corpora.passages import split
from espalier.corpora.tasks.catalogue import task_named
from espalier.corpora.tasks.reading import read_items
from espalier.corpora.tasks.sharing import split_items
from espalier.corpora.windows import Encode
from espalier.settings.home import at_home
from espalier.settings.mistakes import Mistake
from espalier.settings.node import NodeSettings
from espalier.settings.run import BUILT_IN_TEXTS, RunSettings
from espalier.settings.task import TEXT

LARGE = 4 * 1024 * 1024
"""Bytes from which on only the beginning of a file is read."""

FIRST_ITEMS = 1000
"""As many items of a large file are looked at."""

ANY_CLIENT = 0
"""A site takes its own file whole, whatever its number, which is not known yet."""


def require_enough(settings: RunSettings, node: NodeSettings, encode: Encode) -> None:
    """Refuse a run that the site's ``data-path`` cannot serve, in the words of the round that would.

    What a site without one holds depends on its number, and is passed over here, if the run names anything.

    Raises
    ------
    Mistake
        Neither site nor run names a file, it cannot be read, or there is not enough in it.
    """
    tunes = settings.tunes
    data = settings.data
    on_items = tunes and settings.task.name != TEXT
    of_the_run = node.simulated and bool(data.path or data.source == "hub")
    if not node.data_path and (of_the_run or (data.source in BUILT_IN_TEXTS and not on_items)):
        return
    if _size(node.data_path) > LARGE:
        with suppress(Mistake):  # it is told below
            if (
                _begins_with_items(settings, node)
                if on_items
                else _begins_with_windows(settings, node, encode, tunes)
            ):
                return
    if on_items:
        client_items(settings, node, ANY_CLIENT)
    elif tunes:
        training_windows(settings, node, encode, ANY_CLIENT)
    else:
        client_windows(settings, node, encode, ANY_CLIENT)


@told_at_the_site
def require_readable(settings: RunSettings, node: NodeSettings) -> None:
    """Refuse a run that the site's ``data-path`` cannot serve whatever the tokenizer, where there is none as yet.

    Raises
    ------
    Mistake
        The file cannot be read, or holds nothing to train on.
    """
    on_items = settings.tunes and settings.task.name != TEXT
    require_own_data(node, settings.data, settings.task.name if on_items else TEXT)
    if not node.data_path:
        return
    if on_items:
        if _size(node.data_path) <= LARGE or not _begins_with_items(settings, node):
            client_items(settings, node, ANY_CLIENT)
    else:
        # A file that is empty, or none, is told when it is read.
        next(site_records(settings.data, node), None)


def _size(path: str) -> int:
    try:
        return at_home(path).stat().st_size
    except OSError:
        return 0  # it is told when the file is read


def _begins_with_items(settings: RunSettings, node: NodeSettings) -> bool:
    task = task_named(settings.task.name)
    require_own_data(node, settings.data, task.name)
    items = read_items(task, node.data_path)
    train, _ = split_items(islice(items, FIRST_ITEMS))
    return bool(train)


def _begins_with_windows(
    settings: RunSettings, node: NodeSettings, encode: Encode, tunes: bool
) -> bool:
    """Whether the windows that the run asks for are in the file's beginning; a token has a character or more."""
    require_own_data(node, settings.data)
    wanted = settings.data.window_tokens * (1 if tunes else node.windows or settings.data.windows)
    if not tunes:
        require_tokens(
            node, wanted, "raise data.windows or data.window-tokens, or the site's windows"
        )
    for texts in _beginnings((record.text for record in site_records(settings.data, node)), wanted):
        own, _ = split(texts)
        if len(encode("\n\n".join(own))) >= wanted:
            return True
    return False


def _beginnings(texts: Iterable[str], characters: int) -> Iterator[list[str]]:
    """The first texts, each time with twice as many characters as before, until there are no more."""
    taken: list[str] = []
    size = 0
    for text in texts:
        taken.append(text)
        size += len(text)
        if size >= characters:
            yield taken
            characters = 2 * size
    yield taken
