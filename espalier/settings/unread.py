"""Keys of the shared tables that a run does not read, given its method, task and data source."""

from collections.abc import Mapping
from typing import Any

from espalier.settings.task import TEXT, tasks

OF_ITEMS = ("test-path", "max-test-items", "max-tokens", "max-test-tokens")
"""Keys of ``[task]`` that apply only to tasks with items, not to text."""


def not_read(
    flat: Mapping[str, Any], tuning: tuple[str, ...], pruning: tuple[str, ...]
) -> dict[str, tuple[str, str]]:
    """Return the keys that are not read, each with the reason and a remedy.

    Parameters
    ----------
    flat : all settings with dotted keys; a value may itself be invalid
    tuning, pruning : methods that train, and methods that draw calibration samples

    Returns
    -------
    Mapping
        From an unread key to the key whose value is the reason, and to the values, in words, with
        which it would be read.
    """
    found: dict[str, tuple[str, str]] = {}

    # The first reason that is noted for a key is the one that is reported.
    def note(choice: str, remedy: str, *keys: str) -> None:
        for key in keys:
            found.setdefault(key, (choice, remedy))

    tunes = flat["method"] in tuning
    task = flat["task.name"]
    source = flat["data.source"]
    if tunes:
        note("method", one_of("method", pruning), "data.num-samples")
        if task == TEXT:
            note("task.name", "another task", *(f"task.{key}" for key in OF_ITEMS))
        else:
            note(
                "task.name",
                f"task.name = '{TEXT}'",
                "data.sequence-length",
                "data.field",
                "data.partition-field",
            )
        generated = tuple(name for name, one in tasks().items() if one.generation)
        if task not in generated:
            note("task.name", one_of("task.name", generated), "task.answer-tokens")
    if source not in ("jsonl", "hub"):
        note("data.source", one_of("data.source", ("jsonl", "hub")), "data.field")
    if source != "hub":
        note("data.source", "data.source = 'hub'", "data.hub-config")
    if "{client}" in str(flat["data.path"]):
        note(
            "data.path",
            "a data.path without {client}",
            "data.partition",
            "data.partition-field",
            "data.alpha",
        )
    if flat["data.partition"] not in ("by-field", "dirichlet"):
        note(
            "data.partition",
            one_of("data.partition", ("by-field", "dirichlet")),
            "data.partition-field",
        )
    if flat["data.partition"] not in ("dirichlet", "quantity"):
        note("data.partition", one_of("data.partition", ("dirichlet", "quantity")), "data.alpha")
    return found


def one_of(key: str, values: tuple[Any, ...]) -> str:
    """Return a choice between values in words, such as ``method = 'a' or 'b'``."""
    return f"{key} = {' or '.join(map(repr, values))}"
