"""The keys of the settings as plain data, read from the tables that validate them: what documentation is made of."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from pydantic.fields import FieldInfo

from espalier.settings.federation import FederationSettings
from espalier.settings.methods import METHODS, settings_of
from espalier.settings.run import RunSettings, concerns, tables
from espalier.settings.table import Table


@dataclass(frozen=True)
class Key:
    """One setting."""

    table: str
    """The table that it stands in; empty for a key of no table."""
    name: str
    """With hyphens, as it is written."""
    default: Any
    allowed: str
    """The values that it may have, in words; empty for any text."""
    choices: tuple[Any, ...]
    """All values that it may have, where these can be listed."""
    description: str

    @property
    def dotted(self) -> str:
        """As the command line has it."""
        return f"{self.table}.{self.name}" if self.table else self.name


def tables_of_a_run() -> dict[str, type[Table]]:
    """Table by its name; the keys of no table come first, under the empty name."""
    return {"": RunSettings, **tables()}


def keys_of(table: type[Table], name: str = "") -> list[Key]:
    """The keys of one table, without those of the tables in it.

    Parameters
    ----------
    table : the schema
    name : how the table is called in the settings
    """
    fields = {field.alias or attribute: field for attribute, field in table.model_fields.items()}
    return [_key(table, name, key, field) for key, field in fields.items() if not _is_table(field)]


def keys_of_a_run() -> list[Key]:
    """All keys of the settings of a run, in the schema's order."""
    return [key for name, table in tables_of_a_run().items() for key in keys_of(table, name)]


def readers_of(table: str) -> list[str]:
    """The methods that read a table."""
    return [method for method in METHODS if concerns(table, method)]


def _is_table(field: FieldInfo) -> bool:
    return isinstance(field.annotation, type) and issubclass(field.annotation, Table)


def _key(table: type[Table], name: str, key: str, field: FieldInfo) -> Key:
    choices = tuple(METHODS) if (table, key) == (RunSettings, "method") else _choices(field)
    description = " ".join(
        filter(None, [field.description or "", _by_method(table, key), _read_with(table, key)])
    )
    allowed = (
        ", ".join(as_text(choice) or "empty" for choice in choices) if choices else _bounds(field)
    )
    return Key(name, key, field.default, allowed, choices, description)


def _choices(field: FieldInfo) -> tuple[Any, ...]:
    return (True, False) if field.annotation is bool else get_args(field.annotation)


def _bounds(field: FieldInfo) -> str:
    """The range of a number: ``1 or more``, ``over 0, at most 1``; empty where there is none."""
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
    """A sentence on the values of other keys with which this one is read (``Table.READ_WITH``); empty where it always is."""
    possible = {field.alias or name: _choices(field) for name, field in table.model_fields.items()}
    found = []
    for other, values in table.READ_WITH.get(key, {}).items():
        choices = possible.get(other) or values
        found.append(f"`{other}` is {_one_of([value for value in values if value in choices])}")
    return f"Read only where {' and '.join(found)}." if found else ""


def _by_method(table: type[Table], key: str) -> str:
    """What a key of ``[federation]`` stands for with each method, as the methods' own tables say it; empty of other keys."""
    jobs = (
        {method: settings_of(method) for method in METHODS} if table is FederationSettings else {}
    )
    readers = {method: job for method, job in jobs.items() if key in job.FEDERATION}
    if key == "rounds":
        usual = {method: job.ROUNDS for method, job in readers.items()}
        return (
            "That is"
            f" {'; '.join(f'{rounds} with {_methods(usual, rounds)}' for rounds in sorted(set(usual.values())))}."
        )
    if key != "client-weights":
        return ""
    first = {method: job.WEIGHTS[0] for method, job in readers.items()}
    paper = "; ".join(
        f"`{value}` with {_methods(first, value)}" for value in dict.fromkeys(first.values())
    )
    found = [f"`paper` is {paper}."]
    for value in dict.fromkeys(value for job in readers.values() for value in job.WEIGHTS):
        known = {method: value in job.WEIGHTS for method, job in readers.items()}
        found += [] if all(known.values()) else [f"`{value}` is for {_methods(known, True)} alone."]
    return " ".join(found)


def _methods(values: Mapping[str, Any], value: Any) -> str:
    """The methods that have a value, in words."""
    *others, last = sorted(method for method, own in values.items() if own == value)
    return f"{', '.join(others)} and {last}" if others else last


def _one_of(values: Sequence[Any]) -> str:
    *others, last = [f"`{as_text(value)}`" if value != "" else "empty" for value in values]
    return f"{', '.join(others)} or {last}" if others else last


def as_text(value: Any) -> str:
    """A value as it is written after ``key=``."""
    return str(value).lower() if isinstance(value, bool) else str(value)
