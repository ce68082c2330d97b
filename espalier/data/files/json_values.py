"""Descriptions of record values and fields for errors; they never quote a value."""

import math
import re
from collections.abc import Mapping
from typing import Any

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,39}")
"""Pattern of field names that errors can show; other names might be private text."""
MAX_NAMES = 12
"""Maximum number of field names in an error."""


def kind_of(value: Any) -> str:
    """Return the kind of a value in JSON's terms."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, int):
        return "a number"
    if isinstance(value, float):
        return "a number" if math.isfinite(value) else "a number that is not finite"
    for kind, name in ((str, "a string"), (Mapping, "an object"), (list | tuple, "a list")):
        if isinstance(value, kind):
            return name
    return f"a value of the type {type(value).__name__}"


def is_label(value: Any) -> bool:
    """Return whether a value can label a record: a string, a finite number or a truth value.

    Tables hold null or NaN for a missing label.
    """
    return isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))


def fields_there(record: Mapping[str, Any]) -> str:
    """List the fields of a record with their kinds; fields with unusual names are only counted."""
    shown = [name for name in record if _NAME.fullmatch(name)][:MAX_NAMES]
    named = [f"{name} ({kind_of(record[name])})" for name in shown]
    if others := len(record) - len(shown):
        named.append(f"{others} more" if shown else f"{others} whose names are not shown here")
    return f"it has the fields {', '.join(named)}" if named else "it has no fields"
