"""Data of the studies, from a training file and a test file of a task, and a text.

The hash of its question assigns a training record to the clients or to the public in-domain text,
never to both. Records with the question of a test item are dropped.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from espalier.data.client_items import public_items
from espalier.data.passages import digest
from espalier.data.tasks.catalogue import task_of
from espalier.data.tasks.item import Item
from espalier.data.tasks.task_source import items_in
from espalier.errors import InputError
from espalier.settings.run import RunSettings
from espalier.storage.atomic import write_bytes

PUBLIC_PERCENT = 30
"""Percentage of the training records whose text is public; no client has these records."""
KINDS = 1000


@dataclass(frozen=True)
class Sources:
    """Files of the studies."""

    clients: Path
    """Records that are distributed to the clients."""
    in_domain: Path
    """Questions and right answers of other records, as text."""
    out_of_domain: Path
    """Beginning of a text of another domain."""
    tested: Path
    """Questions and right answers of the test items, as text for perplexities."""


def make_sources(
    settings: RunSettings, train: Path, public: Path, folder: Path, records: int, characters: int
) -> Sources:
    """Write the studies' data to a folder.

    Parameters
    ----------
    settings : settings of a run on the task, with its test file
    train : training file of the task
    public : text of another domain
    folder : folder for the data
    records : maximum number of records of all clients together; the first ones of the file
    characters : maximum number of characters of each public text

    Raises
    ------
    InputError
        A file is missing, damaged or too short, or the public text has questions of test items.
    """
    folder.mkdir(parents=True, exist_ok=True)
    found = Sources(
        *(
            folder / name
            for name in ("clients.jsonl", "in-domain.txt", "out-of-domain.txt", "tested.txt")
        )
    )
    tested = public_items(settings)
    known = {digest(item.text) for item in tested}
    private = list[str]()
    text = list[Item]()
    for line, item in _numbered(settings, train):
        if digest(item.text) in known:
            continue
        if is_public(item):
            text.append(item)
        elif len(private) < records:
            private.append(line)
    if not private or not text:
        raise InputError(f"{train}: has too few records for clients and public text")
    write_bytes(found.clients, "".join(private).encode())
    write_bytes(found.in_domain, _joined(text, characters).encode())
    write_bytes(found.tested, _joined(tested).encode())
    other = _beginning(public, characters)
    if shared := known & {digest(line) for line in other.splitlines()}:
        raise InputError(
            f"{public}: has {len(shared)} lines that are questions of test items; give another text"
        )
    write_bytes(found.out_of_domain, other.encode())
    return found


def is_public(item: Item) -> bool:
    """Return whether a training item's text is public.

    The hash bits differ from those that select held-out items.
    """
    return int.from_bytes(digest(item.text)[-8:], "big") % KINDS < 10 * PUBLIC_PERCENT


def _numbered(settings: RunSettings, train: Path) -> Iterator[tuple[str, Item]]:
    """Yield each record as a line of JSON, and its item."""
    items = items_in(task_of(settings), str(train)).items()
    with open(train, encoding="utf-8", newline="\n") as file:
        for line, item in zip((line for line in file if line.strip()), items, strict=True):
            yield json.dumps(json.loads(line), ensure_ascii=False) + "\n", item


def _joined(items: Iterable[Item], characters: int = 0) -> str:
    """Return questions and right answers with blank lines between them.

    Only whole items are included, up to ``characters`` characters (0 means all).
    """
    parts = list[str]()
    length = 0
    for item in items:
        part = f"{item.prompt}{item.delimiter}{item.gold}\n\n"
        length += len(part)
        if characters and length > characters:
            break
        parts.append(part)
    return "".join(parts)


def _beginning(text: Path, characters: int) -> str:
    """Return the first ``characters`` characters of a text at most, up to the end of a line."""
    try:
        with open(text, encoding="utf-8") as file:
            return file.read(characters).rpartition("\n")[0] + "\n"
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{text}: cannot be read ({error})") from None
