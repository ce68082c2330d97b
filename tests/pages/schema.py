"""Schema of all settings as plain data, from which the documentation is generated.

The keys are read from the pydantic tables that validate them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic.fields import FieldInfo

from espalier.settings.keys import as_text, choices_of, keys_of_table, tables
from espalier.settings.registry import METHODS, settings_of, tables_of
from espalier.settings.shared_keys import all_shared_keys, fields_by_key, shared_keys
from espalier.settings.table import Table
from espalier.settings.tables.federation import OF_THE_METHOD, FederationSettings
from espalier.settings.top_level import TopSettings


@dataclass(frozen=True)
class Key:
    """One setting of a run or of a node."""

    table: str
    """Name of its table; empty for a top-level key."""
    name: str
    """Name with hyphens, as written in a file."""
    default: Any
    allowed: str
    """Allowed values in words; empty if any text is allowed."""
    choices: tuple[Any, ...]
    """All allowed values if they can be listed, else empty."""
    description: str

    @property
    def dotted(self) -> str:
        """Name with its table, as written on the command line."""
        return f"{self.table}.{self.name}" if self.table else self.name


def tables_of_a_run() -> dict[str, type[Table]]:
    """Return all tables by name; the empty name, first, holds the top-level keys."""
    return {"": TopSettings, **tables()}


def keys_of(table: type[Table], name: str = "") -> list[Key]:
    """Return the keys of one table.

    Parameters
    ----------
    name : name of the table in the settings; empty for the top-level keys
    """
    return [_key(table, name, key, field) for key, field in keys_of_table(name, table).items()]


def keys_of_a_run() -> list[Key]:
    """Return all keys of a run's settings, in the order of the schema."""
    return [key for name, table in tables_of_a_run().items() for key in keys_of(table, name)]


def _key(table: type[Table], name: str, key: str, field: FieldInfo) -> Key:
    choices = choices_of(table, key)
    description = " ".join(
        filter(
            None,
            [
                field.description or "",
                _by_method(table, key),
                _readers(name, key),
                _read_with(table, key),
            ],
        )
    )
    allowed = (
        ", ".join(as_text(choice) or "empty" for choice in choices) if choices else _bounds(field)
    )
    return Key(name, key, field.default, allowed, choices, description)


def _bounds(field: FieldInfo) -> str:
    """Return the range of a number in words, such as ``1 or more``; empty if it has no bounds."""
    limits = {
        name: getattr(limit, name)
        for limit in field.metadata
        for name in ("ge", "gt", "le", "lt")
        if hasattr(limit, name)
    }
    shown = {
        name: f"{int(limit):,}" if limit == int(limit) else f"{limit:g}"
        for name, limit in limits.items()
    }
    if list(shown) == ["ge"]:
        return f"{shown['ge']} or more"
    if list(shown) == ["ge", "le"]:
        return f"{shown['ge']} to {shown['le']}"
    words = {"ge": "at least", "gt": "over", "le": "at most", "lt": "below"}
    return ", ".join(f"{words[name]} {shown[name]}" for name in words if name in shown)


def _read_with(table: type[Table], key: str) -> str:
    """Return a sentence on the values of other keys with which this key is read.

    The text is empty if the key is always read (``Table.READ_WITH``).
    """
    possible = {name: choices_of(table, name) for name in fields_by_key(table)}
    found = []
    for other, values in table.READ_WITH.get(key, {}).items():
        # Methods share rules, so a rule may list values that only another method's key has.
        choices = possible.get(other) or values
        found.append(f"`{other}` is {_one_of([value for value in values if value in choices])}")
    if not found:
        return ""
    anyway = [
        f"; with `{own}={value}` it does not depend on `{condition.partition('.')[2]}`"
        for row in METHODS.values()
        for (whole, condition), (own, value) in row.settings.READ_ANYWAY.items()
        if whole.partition(".")[2] == key and issubclass(table, FederationSettings)
    ]
    return f"Read only if {' and '.join(found)}{''.join(anyway)}."


def _readers(name: str, key: str) -> str:
    """Return a sentence on the methods that read a shared key, if not all of its table do."""
    if all_shared_keys().get(key) != name:
        return ""
    readers = {method: key in shared_keys(settings_of(method)) for method in METHODS}
    others = {method for method in METHODS if name in tables_of(method) and not readers[method]}
    return f"Read by {_methods(readers, True)}." if others else ""


def _by_method(table: type[Table], key: str) -> str:
    """Return sentences on the meaning of a ``[federation]`` key for each method.

    The meaning of ``rounds``, ``client-weights`` and ``aggregation-rule`` depends on the method, as
    the methods' own tables define it. The text is empty for other keys.
    """
    jobs = (
        {method: settings_of(method) for method in METHODS} if table is FederationSettings else {}
    )
    readers = {method: job for method, job in jobs.items() if key in job.FEDERATION}
    if key == "rounds":
        usual = {method: job.ROUNDS for method, job in readers.items()}
        defaults = [
            f"{rounds} with {_methods(usual, rounds)}" for rounds in sorted(set(usual.values()))
        ]
        return f"The default is {'; '.join(defaults)}."
    if key not in OF_THE_METHOD:
        return ""
    default, attribute = OF_THE_METHOD[key]
    values: dict[str, tuple[str, ...]] = {
        method: getattr(job, attribute) for method, job in readers.items()
    }
    first = {method: own[0] for method, own in values.items()}
    paper = "; ".join(
        f"`{value}` with {_methods(first, value)}" for value in dict.fromkeys(first.values())
    )
    found = [f"`{default}` is {paper}."]
    for value in dict.fromkeys(value for own in values.values() for value in own):
        known = {method: value in own for method, own in values.items()}
        found += (
            [] if all(known.values()) else [f"Only {_methods(known, True)} can have `{value}`."]
        )
    return " ".join(found)


def _methods(values: Mapping[str, Any], value: Any) -> str:
    """Return the names of the methods that have a value, joined by commas and "and"."""
    *others, last = sorted(method for method, own in values.items() if own == value)
    return f"{', '.join(others)} and {last}" if others else last


def _one_of(values: Sequence[Any]) -> str:
    *others, last = [f"`{as_text(value)}`" if value != "" else "empty" for value in values]
    return f"{', '.join(others)} or {last}" if others else last
