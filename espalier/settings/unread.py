"""Keys of the shared tables that a run does not read, because of what it chose elsewhere: a method, a task, a source."""

from collections.abc import Mapping
from typing import Any

from espalier.settings.task import TEXT, WRITTEN

OF_ITEMS = ("test-path", "max-test-items", "max-tokens", "max-test-tokens", "loss-on")
"""Keys of ``[task]`` that text has no use for."""


def not_read(
    flat: Mapping[str, Any], tuning: tuple[str, ...], pruning: tuple[str, ...]
) -> dict[str, tuple[str, str]]:
    """Keys that are not read, by the key whose value is the reason, and what would have them read, in words.

    Parameters
    ----------
    flat : all settings, dotted keys; a value may be wrong in itself
    tuning, pruning : the methods that train, and those that draw calibration windows
    """
    found: dict[str, tuple[str, str]] = {}

    def note(choice: str, remedy: str, *keys: str) -> None:
        for key in keys:
            found.setdefault(key, (choice, remedy))

    tunes = flat["method"] in tuning
    task = flat["task.name"]
    source = flat["data.source"]
    if tunes:
        note("method", one_of("method", pruning), "data.windows")
        if task == TEXT:
            note("task.name", "another task", *(f"task.{key}" for key in OF_ITEMS))
        else:
            note(
                "task.name",
                f"task.name = '{TEXT}'",
                "data.window-tokens",
                "data.field",
                "data.partition-field",
            )
        if task not in WRITTEN:
            note("task.name", one_of("task.name", WRITTEN), "task.answer-tokens")
        if flat["training.base"] != "nf4":
            note("training.base", "training.base = 'nf4'", "training.double-quantisation")
    if source not in ("jsonl", "hub"):
        note("data.source", one_of("data.source", ("jsonl", "hub")), "data.field")
    if source != "hub":
        note("data.source", "data.source = 'hub'", "data.hub-config", "data.hub-split")
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
    """A choice in words."""
    return f"{key} = {' or '.join(map(repr, values))}"
