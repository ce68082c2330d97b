"""Items of one client: training items and held-out items of a task."""

import re
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

from espalier.data.client_text import MIN_PREDICTIONS, own_file
from espalier.data.data_protection import no_data, not_allowed, require_own_data, told_at_the_site
from espalier.data.files.hub import TEST_SPLIT
from espalier.data.partition import Partition
from espalier.data.tasks.catalogue import task_named
from espalier.data.tasks.encoding import prompt_encoder
from espalier.data.tasks.item import Item
from espalier.data.tasks.reading import read_hub_items, read_items, shares_of_items, split_items
from espalier.data.tasks.scored_items import ScoredItems, class_items, scored_items
from espalier.data.tasks.task import Task
from espalier.errors import InputError
from espalier.settings.node import NodeSettings
from espalier.settings.run import RunSettings

UNLIMITED = 1 << 30
"""Maximum number of tokens of an item if the model has no limit."""
MIN_ITEMS = 100
"""Minimum number of a client's items over which a loss must be averaged.

It holds in addition to ``MIN_PREDICTIONS``, because a few long answers come from few people.
"""


@told_at_the_site
def client_items(
    settings: RunSettings, node: NodeSettings, client: int
) -> tuple[list[Item], list[Item]]:
    """Return a client's training items and held-out items, which have no question in common.

    As with text, the node's ``data-path`` is the site's own data and used whole. Without one, in a
    simulation, the run's ``[data]`` determines the client's items.

    Raises
    ------
    InputError
        The source or file is missing, empty or malformed, or nothing is left to train on.
    """
    task = task_named(settings.task.name)
    data = settings.data
    require_own_data(node, data, task.name)
    own: Iterable[Item]
    if node.data_path:
        own = read_items(task, node.data_path)
    elif data.source != "hub" and not data.path:
        raise no_data()
    elif "{client}" in data.path:
        own = read_items(task, data.path.replace("{client}", str(client)))
    elif data.partition == "by-file":
        own = read_items(task, own_file(data.path, client, settings.num_clients))
    else:
        deal = Partition(data.partition, settings.num_clients, data.alpha, settings.seed)
        own = _dealt(settings, task, deal)[client]
    train, held_out = split_items(own)
    if not train:
        raise InputError(
            f"data: the client has no training items of the task {task.name}; duplicates count"
            " once, and one item in ten is held out; give the client more items, or raise"
            " data.alpha"
        )
    return train, held_out


def _dealt(settings: RunSettings, task: Task, deal: Partition) -> list[list[Item]]:
    """Return the items of a shared dataset by client, for simulated clients."""
    if settings.data.source == "hub":
        items = read_hub_items(
            task, _training_split(settings, task), settings.data.path, settings.data.hub_config
        )
        return shares_of_items(deal, items)
    try:
        found = Path(settings.data.path).stat()
    # Reading the file raises the error that says what is wrong.
    except OSError:
        return shares_of_items(deal, read_items(task, settings.data.path))
    version = found.st_ino, found.st_size, found.st_mtime_ns
    return _dealt_file(deal, task.name, settings.data.path, version)


@lru_cache(maxsize=1)
def _dealt_file(
    deal: Partition, task: str, path: str, version: tuple[int, ...]
) -> list[list[Item]]:
    """Return a file's items by client.

    The simulated clients of a process read the file once, until its ``version`` changes.
    """
    return shares_of_items(deal, read_items(task_named(task), path))


def _training_split(settings: RunSettings, task: Task) -> str:
    return settings.data.hub_split or task.hub.train


@told_at_the_site
def held_out_items(
    settings: RunSettings,
    node: NodeSettings,
    tokenizer: Any,
    client: int,
    classes: bool,
    positions: int | None,
) -> ScoredItems:
    """Return a client's held-out items, at most ``task.max-test-items``, encoded for a model.

    Parameters
    ----------
    classes : whether the model is an encoder with a classification head
    positions : maximum number of positions of the model; None: no limit

    Raises
    ------
    InputError
        The site does not permit it, the source or file is wrong, or there are so few items that a
        mean would reveal single ones.
    """
    if not node.allows_own_text():
        raise not_allowed()
    _, held_out = client_items(settings, node, client)
    found = as_tests(
        settings, held_out[: settings.task.max_test_items or None], tokenizer, classes, positions
    )
    places = list(zip(found.options(), found.answers, strict=True))
    predictions = (
        len(found) if classes else sum(options[answer].answer_tokens for options, answer in places)
    )
    if predictions < MIN_PREDICTIONS or len(found) < MIN_ITEMS:
        text = (
            f"evaluation.own-text: the client has fewer than {MIN_ITEMS} held-out items, or"
            f" they give fewer than {MIN_PREDICTIONS} predictions (answer tokens or classes),"
            " and their mean would reveal too much about single items; give the client more"
            f" items, or raise task.max-test-items = {settings.task.max_test_items} (0 means"
            " all)"
        )
        raise InputError(text, text)
    return found


def as_tests(
    settings: RunSettings, items: list[Item], tokenizer: Any, classes: bool, positions: int | None
) -> ScoredItems:
    """Encode items for a language model, or for an encoder with classes.

    Items are not cut unless the model or ``task.max-test-tokens`` requires it.

    Parameters
    ----------
    classes : whether the model is an encoder with a classification head
    positions : maximum number of positions of the model; None: no limit
    """
    chosen = settings.task
    limit = UNLIMITED if positions is None else positions
    if classes:
        return class_items(items, tokenizer, chosen.max_test_tokens or limit)
    encode = prompt_encoder(tokenizer)
    # The model does not predict the token after the last one, so one more token can be scored than
    # the model has positions.
    return scored_items(task_named(chosen.name), items, encode, chosen.max_test_tokens or limit + 1)


def public_items(settings: RunSettings) -> list[Item]:
    """Return the public test items of the run's task; empty if the run names none.

    If there are more than ``task.max-test-items``, evenly spaced ones are taken.

    Raises
    ------
    InputError
        The file or dataset cannot be read, or clients train on its test split.
    """
    chosen = settings.task
    task = task_named(chosen.name)
    if chosen.test_path:
        items = list(read_items(task, chosen.test_path, "task.test-path"))
    elif settings.data.source == "hub" and task.hub.test:
        _require_other_split(settings, task)
        items = list(
            read_hub_items(
                task, task.hub.test, settings.data.path, settings.data.hub_config, TEST_SPLIT
            )
        )
    else:
        return []
    number = min(len(items), chosen.max_test_items or len(items))
    return [items[place * len(items) // number] for place in range(number)]


def _require_other_split(settings: RunSettings, task: Task) -> None:
    """Refuse a test split that clients train on, whole or in part.

    The name ``all`` stands for every split of a dataset.
    """
    split = _training_split(settings, task)
    names = {re.split(r"[\[(]", part)[0].strip() for part in split.split("+")}
    if names & {task.hub.test, "all"}:
        raise InputError(
            f"data.hub-split = {split!r}: {task.hub.test!r} contains the public test items of"
            f" the task {task.name}, and clients must not train on them; choose another split,"
            " or name other test items in task.test-path"
        )
