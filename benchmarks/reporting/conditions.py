"""Conditions of a study: its rows must share them, except that evaluation texts may be added."""

from collections.abc import Mapping
from typing import Any


def together(
    found: Mapping[str, Any], given: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Merge the conditions of existing rows with those of new ones.

    Returns
    -------
    conditions : conditions of all rows
    differ : sorted names of the conditions that differ; ``texts`` if one name stands for two texts
    """
    before = found.get("texts", {})
    now = given.get("texts", {})
    differ = {
        name
        for name in found.keys() | given.keys()
        if name != "texts" and found.get(name) != given.get(name)
    }
    if any(before[name] != now[name] for name in before.keys() & now.keys()):
        differ.add("texts")
    texts = {"texts": {**before, **now}} if before or now else {}
    return {**given, **texts}, sorted(differ)
