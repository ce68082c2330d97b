"""Items of one client: training items and held-out items of a task."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

import numpy as np

from espalier.data.client_files import client_files, training_paths
from espalier.data.client_text import MIN_PREDICTIONS, group_field
from espalier.data.data_protection import (
    not_allowed,
    redacted_errors,
    require_groups,
    require_own_data,
)
from espalier.data.files.corpus_index import Indexed, open_corpus
from espalier.data.files.files import CLIENT_KEYS, JsonLinesRows
from espalier.data.files.formats import open_rows
from espalier.data.files.hub import TEST_SPLIT
from espalier.data.files.rows import RowFile
from espalier.data.partition import Partition
from espalier.data.tasks.catalogue import TASKS, task_of
from espalier.data.tasks.chat_encoding import chat_items, template_of
from espalier.data.tasks.encoding import prompt_encoder
from espalier.data.tasks.item import Item
from espalier.data.tasks.scored_items import ScoredItems, class_items, scored_items
from espalier.data.tasks.task import Task
from espalier.data.tasks.task_source import (
    ItemSource,
    hub_rows,
    items_in,
    require_fields_differ,
    require_fields_of,
)
from espalier.errors import InputError
from espalier.settings.node import NodeSettings
from espalier.settings.run import RunSettings
from espalier.settings.table import columns_of
from espalier.settings.tables.data import OWN_TASKS, prompt_fields
from espalier.settings.tables.task import CHAT

TEST_PATH = "task.test-path"
UNLIMITED = 1 << 30
"""Maximum number of tokens of an item if the model has no limit."""
MIN_ITEMS = 100
"""Minimum number of a client's items over which a loss must be averaged.

It holds in addition to ``MIN_PREDICTIONS``, because a few long answers come from few people.
"""


@redacted_errors
def client_items(
    settings: RunSettings, node: NodeSettings, client: int
) -> tuple[Indexed[Item], Indexed[Item]]:
    """Return a client's training items and held-out items, which have no question in common.

    They are read on access, so memory stays bounded.

    As with text, the node's ``data-path`` is the site's own data and used whole. Without one, in a
    simulation, the run's ``[data]`` determines the client's items. Raises InputError if the source
    or file is missing, empty or malformed, nothing is left to train on, or there are fewer groups
    than ``min-groups``.
    """
    task = task_of(settings)
    data = settings.data
    require_own_data(node, data, task.name)
    hub = None
    if data.origin == "hub":
        hub = hub_rows(task, _training_split(settings, task), data.path, data.hub_config)
    columns = mapped_columns(settings, node, task)
    group = group_field(data, node)
    source = client_files(settings, node, client, JsonLinesRows, hub)
    label = data.partition_field if source.partition else ""
    wording = (data.prompt, data.labels)
    corpus = open_corpus(
        ItemSource(task, source.files, columns, group, label, wording),
        node.state_root(),
    )
    if isinstance(source.partition, Partition):
        if source.partition.kind in ("by-field", "dirichlet") and "" in corpus.labels:
            where = f" in the field '{label}'" if label else ""
            raise InputError(
                f"data.partition = {data.partition!r}: records of the task {task.name} have no"
                f" label{where}; name another field of theirs in data.partition-field, or choose"
                " 'iid' or 'quantity'"
            )
        source.partition.require_enough(corpus.labels)
    # With duplicates left out, what a record or group contributes would depend on the others.
    distinct = not settings.privacy.on
    train, held_out = corpus.share(
        source.partition, client, distinct=distinct, never_empty=distinct and bool(group)
    )
    if node.fewest_groups():
        require_groups(node, [set(train.label_numbers.tolist())], "give the site more data")
    if not train:
        raise InputError(_nothing_to_train_on(settings, node, bool(held_out)))
    return train, held_out


def _nothing_to_train_on(settings: RunSettings, node: NodeSettings, held_out: bool) -> str:
    """Return the error text for a client without training items."""
    data = settings.data
    if held_out and group_field(data, node):
        why = "all its groups are held out, as one group in ten is"
    elif held_out:
        why = (
            "all its items are held out, as one question in ten is (items with the same question"
            " are on the same side)"
        )
    else:
        why = "it has none at all; duplicates count once, at one client only"
    remedies = ["give the client more items"]
    if node.simulated and "{client}" not in data.path and settings.num_clients > 1:
        remedies += ["lower num-clients"]
        remedies += ["raise data.alpha"] if data.partition in ("dirichlet", "quantity") else []
    return (
        f"data: the client has no training items of the task {settings.task.name}: {why};"
        f" {', or '.join(remedies)}"
    )


@redacted_errors
def item_groups(settings: RunSettings, node: NodeSettings, client: int) -> np.ndarray:
    """Return the number of the group of each training item of a client, shape ``(items,)``."""
    return client_items(settings, node, client)[0].label_numbers


def mapped_columns(settings: RunSettings, node: NodeSettings, task: Task) -> dict[str, str]:
    """Return the field of a client's file for each field of a task that has another name there.

    At a real site its owner names them. Raises InputError if the task does not have such a field,
    or a site's owner has not named one that the run's prompt needs.
    """
    columns = columns_of(settings.data.columns if node.simulated else node.data_columns)
    if node.simulated:
        require_fields_of(task, columns)
    elif task.name in OWN_TASKS:
        _require_named_fields(settings.data.prompt, columns)
    else:
        _require_no_misspelt(task, columns)
    require_fields_differ(task, columns)
    return columns


def _require_no_misspelt(task: Task, columns: Mapping[str, str]) -> None:
    """Refuse names in a site's ``data-columns`` that are nearly those of a task's fields.

    Others may be names of another task's fields.
    """
    free = [name for name in task.fields if name not in columns]
    known = {name for other in TASKS.values() for name in other.fields}
    for name in columns:
        if name not in known and (meant := get_close_matches(name, free, 1)):
            raise InputError(
                f"data-columns: the task {task.name} has no field '{name}'; did you mean"
                f" {meant[0]}={columns[name]}?"
            )


def _require_named_fields(prompt: str, columns: Mapping[str, str]) -> None:
    """Refuse a run's prompt that names a field that the site's owner has not named.

    Otherwise whoever runs the server would choose what a site trains on.
    """
    if unknown := [name for name in prompt_fields(prompt) if name not in columns]:
        text = (
            f"data.prompt: the run's prompt names {', '.join(map(repr, unknown))}, which this"
            " site's data-columns does not name; if a run may read them, its owner adds"
            f" {','.join(f'{name}={name}' for name in unknown)} to data-columns"
        )
        raise InputError(text, text)


def _training_split(settings: RunSettings, task: Task) -> str:
    return settings.data.hub_split or task.hub.train


@redacted_errors
def held_out_items(
    settings: RunSettings,
    node: NodeSettings,
    model: Any,
    client: int,
) -> ScoredItems:
    """Return a client's held-out items, at most ``task.max-test-items``, encoded for a model.

    Raises InputError if the site does not permit it, the source or file is wrong, or there are so
    few items that a mean would reveal single ones.

    Parameters
    ----------
    model : ``OpenedModel``
    """
    if not node.allows_own_text():
        raise not_allowed()
    _, held_out = client_items(settings, node, client)
    # Read once, because the items are scored in several passes.
    items = list(held_out[: settings.task.max_test_items or None])
    tests = as_tests(settings, items, model)
    places = list(zip(tests.options(), tests.answers, strict=True))
    predictions = (
        len(tests)
        if model.family.kind == "encoder"
        else sum(options[answer].answer_tokens for options, answer in places)
    )
    if predictions < MIN_PREDICTIONS or len(items) < MIN_ITEMS:
        text = (
            f"evaluation.own-text: the client has fewer than {MIN_ITEMS} held-out items, or"
            f" they give fewer than {MIN_PREDICTIONS} predictions (answer tokens or classes),"
            " and their mean would reveal too much about single items; give the client more"
            f" items, or raise task.max-test-items = {settings.task.max_test_items} (0 means"
            " all)"
        )
        raise InputError(text, text)
    return tests


def as_tests(settings: RunSettings, items: Sequence[Item], model: Any) -> ScoredItems:
    """Encode items for a language model, or for an encoder with classes.

    Items are not cut unless the model or ``task.max-test-tokens`` requires it.

    Parameters
    ----------
    model : ``OpenedModel``
    """
    chosen = settings.task
    limit = UNLIMITED if model.num_positions is None else model.num_positions
    if model.family.kind == "encoder":
        return class_items(items, model.tokenizer, chosen.max_test_tokens or limit)
    # The model does not predict the token after the last one, so one more token can be scored than
    # the model has positions.
    max_tokens = chosen.max_test_tokens or limit + 1
    if chosen.name == CHAT:
        return chat_items(items, model, template_of(chosen), max_tokens)
    encode = prompt_encoder(model.tokenizer)
    return scored_items(task_of(settings), items, encode, max_tokens)


def public_items(settings: RunSettings) -> list[Item]:
    """Return the public test items of the run's task; empty if the run names none.

    If there are more than ``task.max-test-items``, evenly spaced ones are taken. Raises InputError
    if the file or dataset cannot be read, or clients train on its test split.
    """
    chosen = settings.task
    task = task_of(settings)
    if chosen.test_path:
        columns = columns_of(settings.data.columns)
        source = items_in(task, chosen.test_path, TEST_PATH, columns)
        _require_other_files(settings, source.files)
        items = list(replace(source, may_have_own_names=True).items())
    elif settings.data.origin == "hub" and task.hub.test:
        _require_other_split(settings, task)
        data = settings.data
        tests = hub_rows(task, task.hub.test, data.path, data.hub_config, TEST_SPLIT)
        items = list(ItemSource(task, (tests,)).items())
    else:
        return []
    number = min(len(items), chosen.max_test_items or len(items))
    return [items[place * len(items) // number] for place in range(number)]


def _require_other_files(settings: RunSettings, tests: Sequence[RowFile]) -> None:
    """Refuse test items in a file on which simulated clients train."""
    data = settings.data
    if data.origin != "files" or not data.path:
        return
    tested = {file.identity() for file in tests}
    for path in training_paths(data, settings.num_clients):
        trained = open_rows(path, CLIENT_KEYS, data.hub_split, JsonLinesRows)
        if both := tested & {file.identity() for file in trained}:
            raise InputError(
                f"{TEST_PATH} = {settings.task.test_path!r}: clients train on {min(both)}"
                " (data.path); name a file of other items"
            )


def _require_other_split(settings: RunSettings, task: Task) -> None:
    """Refuse a test split that clients train on, whole or in part.

    The name ``all`` stands for every split of a dataset.
    """
    split = _training_split(settings, task)
    # The parts of a split such as ``train[:10%]+test``, without their ranges.
    names = {re.split(r"[\[(]", part)[0].strip() for part in split.split("+")}
    if names & {task.hub.test, "all"}:
        raise InputError(
            f"data.hub-split = {split!r}: {task.hub.test!r} contains the public test items of"
            f" the task {task.name}, and clients must not train on them; choose another split,"
            " or name other test items in task.test-path"
        )
