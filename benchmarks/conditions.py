"""What a study was measured with: rows of other conditions are not mixed, but texts may be added from one time to the next."""

from collections.abc import Mapping
from typing import Any


def together(
    found: Mapping[str, Any], given: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Conditions of the rows that there are, and of those that will be added.

    Returns
    -------
    (conditions, differ) : the conditions of all rows, and the names of those in which the two differ; texts differ if one name
        stands for two texts
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
