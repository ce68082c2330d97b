"""The studies' data, from one training file and one test file of a task: the clients' records, and texts that nobody trains on.

By the hash of its question a training record belongs to the clients or to the public text in the task's own domain, never to
both, and to neither if a test item has the same question.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from espalier.corpora.client_items import public_items
from espalier.corpora.passages import digest
from espalier.corpora.tasks.catalogue import task_named
from espalier.corpora.tasks.item import Item
from espalier.corpora.tasks.reading import read_items
from espalier.settings.mistakes import Mistake
from espalier.settings.run import RunSettings
from espalier.storage.atomic import write_bytes

PUBLIC_PERCENT = 30
"""Share of the training records whose text is public, in percent; none of them is a client's."""
KINDS = 1000


@dataclass(frozen=True)
class Sources:
    """Files of the studies."""

    clients: Path
    """Records that are dealt out."""
    in_domain: Path
    """Questions and right answers of other records, as text."""
    out_of_domain: Path
    """The beginning of a text of another kind."""
    tested: Path
    """Questions and right answers of the test items, as text, for perplexities."""


def make_sources(
    settings: RunSettings, train: Path, public: Path, folder: Path, records: int, letters: int
) -> Sources:
    """Write the studies' data into a folder.

    Parameters
    ----------
    settings : of a run on the task, with its test file
    train, public : the task's training file, and a text of another domain
    records : of the clients together, at most; the first of the file
    letters : of each public text, at most

    Raises
    ------
    Mistake
        A file is missing, damaged or too short, or passages of the public text are those of test items.
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
        raise Mistake(f"{train}: has too few records for clients and public text")
    write_bytes(found.clients, "".join(private).encode())
    write_bytes(found.in_domain, _joined(text, letters).encode())
    write_bytes(found.tested, _joined(tested).encode())
    other = _beginning(public, letters)
    if shared := known & {digest(line) for line in other.splitlines()}:
        raise Mistake(
            f"{public}: has {len(shared)} lines that are questions of test items; give another text"
        )
    write_bytes(found.out_of_domain, other.encode())
    return found


def is_public(item: Item) -> bool:
    """Whether a training item's text is public; other bits of the hash than those by which items are held out."""
    return int.from_bytes(digest(item.text)[-8:], "big") % KINDS < 10 * PUBLIC_PERCENT


def _numbered(settings: RunSettings, train: Path) -> Iterator[tuple[str, Item]]:
    """Each record as it stands in the file, with a line end, and its item."""
    items = read_items(task_named(settings.task.name), str(train))
    with open(train, encoding="utf-8", newline="\n") as file:
        for line, item in zip((line for line in file if line.strip()), items, strict=True):
            yield json.dumps(json.loads(line), ensure_ascii=False) + "\n", item


def _joined(items: Iterable[Item], letters: int = 0) -> str:
    """Questions and right answers, with blank lines between; whole ones, ``letters`` at most (0: all)."""
    parts = list[str]()
    length = 0
    for item in items:
        part = f"{item.prompt}{item.delimiter}{item.gold}\n\n"
        length += len(part)
        if letters and length > letters:
            break
        parts.append(part)
    return "".join(parts)


def _beginning(text: Path, letters: int) -> str:
    """The first letters of a text, up to the end of a line."""
    try:
        with open(text, encoding="utf-8") as file:
            return file.read(letters).rpartition("\n")[0] + "\n"
    except (OSError, UnicodeDecodeError) as error:
        raise Mistake(f"{text}: cannot be read ({error})") from None
