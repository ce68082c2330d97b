"""Keys of all tables: their defaults, the methods that read them, and those a run does not read."""

from collections.abc import Collection, Mapping
from typing import Any, get_args

from pydantic.fields import FieldInfo

from espalier.settings.pruning import AUTO, CutSettings
from espalier.settings.registry import METHODS, all_tables, settings_of, tables_of
from espalier.settings.shared_keys import TABLES, all_shared_keys, fields_by_key, shared_keys
from espalier.settings.table import Table
from espalier.settings.tables.data import (
    CLASSIFICATION,
    FLOWER,
    FLOWER_NAME,
    OWN_TASKS,
    PARTITIONS,
    DataSettings,
    source_of,
)
from espalier.settings.tables.evaluation import EvaluationSettings
from espalier.settings.tables.federation import OF_THE_METHOD, FederationSettings
from espalier.settings.tables.lora import LoraSettings
from espalier.settings.tables.privacy import PrivacySettings, unread_for_privacy
from espalier.settings.tables.task import CHAT, TEXT, TaskSettings, tasks
from espalier.settings.tables.training import TrainingSettings
from espalier.settings.top_level import TopSettings
from espalier.settings.unknown_key import unknown_key

GENERAL: dict[str, type[Table]] = {
    "data": DataSettings,
    "evaluation": EvaluationSettings,
    "privacy": PrivacySettings,
}
"""Tables that every method reads."""
SHARED: dict[str, type[Table]] = {
    "federation": FederationSettings,
    "lora": LoraSettings,
    "training": TrainingSettings,
    "task": TaskSettings,
}
"""Tables that several methods read."""


def tables() -> dict[str, type[Table]]:
    """Return all tables by name: general tables, shared tables and each method's own table."""
    return {**GENERAL, **SHARED, **TABLES, **{method: settings_of(method) for method in METHODS}}


def keys_of_table(name: str, kind: type[Table]) -> dict[str, FieldInfo]:
    """Return the fields of a table by the keys that are written there.

    Shared keys of a method are written in a table that is not its own.
    """
    shared = shared_keys(settings_of(name)) if name in METHODS else {}
    return {key: field for key, field in fields_by_key(kind).items() if key not in shared}


def table_of(method: str, key: str) -> str:
    """Return the table in which a key of a method's settings is written."""
    return shared_keys(settings_of(method)).get(key, method)


def default_values() -> dict[str, Any]:
    """Return the default value of every dotted key."""
    known: dict[str, Any] = TopSettings().model_dump(by_alias=True)
    for table, kind in tables().items():
        written = keys_of_table(table, kind)
        known |= {
            f"{table}.{key}": value
            for key, value in kind().model_dump(by_alias=True).items()
            if key in written
        }
    return known


def flatten(nested: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with dotted keys, as Flower passes them on."""
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        if isinstance(value, Mapping):
            flat |= {f"{key}.{inner}": given for inner, given in flatten(value).items()}
        else:
            flat[key] = value
    return flat


def concerns(key: str, method: Any) -> bool:
    """Return whether a method reads a table or its keys.

    A key whose table belongs to no method concerns all methods.
    """
    return key.partition(".")[0] not in _tables_of_others(method)


def _tables_of_others(method: Any) -> set[str]:
    """Return the tables that only other methods read."""
    return all_tables() - set(tables_of(method) if isinstance(method, str) else ())


def changed(flat: Mapping[str, Any]) -> set[str]:
    """Return the keys whose values differ from the defaults, including unknown keys."""
    known = default_values()
    return {key for key, value in flat.items() if key not in known or known[key] != value}


def private_methods(mechanism: str = "") -> tuple[str, ...]:
    """Return the methods that have a mechanism of differential privacy, or this one."""
    found = {name: settings_of(name).MECHANISM for name in METHODS}
    return tuple(name for name, own in found.items() if own and mechanism in ("", own))


def keys_in_order(method: Any) -> list[str]:
    """Return all dotted keys, the ones that the method reads first, for suggestions."""
    others = _tables_of_others(method)
    return sorted(default_values(), key=lambda key: key.partition(".")[0] in others)


def unread(flat: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Return the keys that the run does not read although its method has their table.

    Returns
    -------
    dict
        From an unread key to the key whose value is the reason, and to the values, in words, with
        which it would be read.
    """
    values = default_values() | dict(flat)
    values["data.source"] = source_of(values["data.source"], values["data.path"])
    if str(values["data.partition"]).startswith(FLOWER):
        values["data.partition"] = FLOWER_NAME
    method = str(values["method"])
    mechanism = settings_of(method).MECHANISM if method in METHODS else ""
    for_privacy = unread_for_privacy(values, mechanism, one_of("method", private_methods("dp-sgd")))
    return for_privacy | _not_read_in_tables(values) | _not_read_for_task(values)


def _not_read_for_task(flat: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Return the keys that are not read with this task, or if each client has its own file."""
    unread_keys: dict[str, tuple[str, str]] = {}
    if "{client}" in str(flat["data.path"]):
        own_files = ("data.path", "a data.path without {client}")
        keys = ("partition", "partition-field", "partition-arguments", "alpha")
        unread_keys |= dict.fromkeys((f"data.{key}" for key in keys), own_files)
    if "task" not in tables_of(str(flat["method"])):
        tuning = tuple(method for method, row in METHODS.items() if row.tunes)
        of_tasks = ("data.columns", "data.prompt", "data.labels")
        unread_keys |= dict.fromkeys(of_tasks, ("method", one_of("method", tuning)))
        return unread_keys
    pruning = tuple(method for method, row in METHODS.items() if not row.tunes)
    unread_keys["data.num-samples"] = ("method", one_of("method", pruning))
    if flat["task.name"] == TEXT:
        unread_keys["data.columns"] = ("task.name", "another task")
        items = ("test-path", "max-test-items", "max-tokens", "max-test-tokens", "packing")
        unread_keys |= {f"task.{key}": ("task.name", "another task") for key in items}
    else:
        of_text = ("data.sequence-length", "data.field")
        unread_keys |= dict.fromkeys(of_text, ("task.name", f"task.name = '{TEXT}'"))
    readers = {
        "data.prompt": OWN_TASKS,
        "data.labels": (CLASSIFICATION,),
        "task.chat-template": (CHAT,),
    }
    for key, names in readers.items():
        if flat["task.name"] not in names:
            unread_keys[key] = ("task.name", one_of("task.name", names))
    generated = tuple(name for name, one in tasks().items() if one.generation)
    if flat["task.name"] not in generated:
        unread_keys["task.answer-tokens"] = ("task.name", one_of("task.name", generated))
    return unread_keys


def _not_read_in_tables(flat: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Return the keys that the method or another key's value leaves unread.

    ``MethodSettings.FEDERATION``, the fields of the method's settings and ``Table.READ_WITH``
    declare them.
    """
    unread_keys: dict[str, tuple[str, str]] = {}
    method = str(flat["method"])
    kinds = tables()
    tables_read = tables_of(method)
    for key, (default, attribute) in OF_THE_METHOD.items() if method in METHODS else ():
        if flat[f"federation.{key}"] == default:
            flat = {**flat, f"federation.{key}": getattr(settings_of(method), attribute)[0]}
            if key == "aggregation-rule" and flat["federation.secure-sum"]:
                flat["federation.aggregation-rule"] = "mean"
    for field in FederationSettings.model_fields.values() if "federation" in tables_read else ():
        readers = tuple(name for name in METHODS if field.alias in settings_of(name).FEDERATION)
        if method not in readers:
            unread_keys[f"federation.{field.alias}"] = ("method", one_of("method", readers))
    for key, table in all_shared_keys().items() if method in METHODS else ():
        readers = tuple(name for name in METHODS if key in shared_keys(settings_of(name)))
        if table in tables_read and method not in readers:
            unread_keys[f"{table}.{key}"] = ("method", one_of("method", readers))
    for table in (*GENERAL, *tables_read):
        for key, conditions in kinds[table].READ_WITH.items():
            for choice, values in conditions.items():
                chosen, whole = (
                    name if "." in name else f"{table}.{name}" for name in (choice, key)
                )
                if flat[chosen] not in values and not _read_anyway(flat, whole, chosen):
                    known = () if "." in choice else _possible(method, kinds[table], choice)
                    possible = tuple(value for value in values if value in known or not known)
                    # The first reason for a key is the one that is reported.
                    unread_keys.setdefault(whole, (chosen, one_of(chosen, possible)))
    return unread_keys


def _read_anyway(flat: Mapping[str, Any], key: str, condition: str) -> bool:
    """Return whether the method's own settings lift a condition (``READ_ANYWAY``)."""
    if flat["method"] not in METHODS:
        return False
    own, value = settings_of(flat["method"]).READ_ANYWAY.get((key, condition), ("method", None))
    return bool(flat[own] == value)


def one_of(key: str, values: tuple[Any, ...]) -> str:
    """Return a choice between values in words, such as ``method = 'a' or 'b'``."""
    return f"{key} = {' or '.join(map(repr, values))}"


def choices_of(table: type[Table], key: str) -> tuple[Any, ...]:
    """Return all allowed values of a key with hyphens; empty if they cannot be listed."""
    if (table, key) == (TopSettings, "method"):
        return tuple(METHODS)
    if (table, key) == (DataSettings, "partition"):
        return (*PARTITIONS, FLOWER_NAME)
    if (table, key) == (TaskSettings, "name"):
        return (TEXT, *tasks())
    field = fields_by_key(table)[key]
    return (True, False) if field.annotation is bool else get_args(field.annotation)


def choices() -> dict[str, tuple[Any, ...]]:
    """Return all allowed values of every dotted key of a run; empty if they cannot be listed."""
    kinds: dict[str, type[Table]] = {"": TopSettings, **tables()}
    names = {key: key.rpartition(".") for key in default_values()}
    return {key: choices_of(kinds[table], name) for key, (table, _, name) in names.items()}


def choices_of_method(method: str) -> dict[str, tuple[Any, ...]]:
    """Return all allowed values of every dotted key that a method reads, as ``choices`` does."""
    kind = settings_of(method)
    # Keys that are unread because of another key's value would be read with another value.
    unread_keys = {key for key, (why, _) in unread({"method": method}).items() if why == "method"}
    allowed = {}
    for key, values in choices().items():
        table, _, name = key.rpartition(".")
        if not concerns(key, method) or key in unread_keys:
            continue
        if shared_keys(kind).get(name) == table:
            values = choices_of(kind, name)
            if issubclass(kind, CutSettings) and name == "selection":
                values = (AUTO, *kind.SELECTIONS)
        elif table == "federation" and name in OF_THE_METHOD:
            values = (OF_THE_METHOD[name][0], *_possible(method, FederationSettings, name))
        allowed[key] = values
    return allowed


def as_text(value: Any) -> str:
    """Return a value as it is written after ``key=``; booleans are in lower case."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _quoted(value: Any) -> str:
    """Return a value as TOML writes it: strings in quotes, booleans in lower case."""
    return as_text(value) if isinstance(value, bool) else repr(value)


def _possible(method: str, table: type[Table], key: str) -> tuple[Any, ...]:
    """Return the values that a key may have with a method; empty if they cannot be listed."""
    if table is FederationSettings and key in OF_THE_METHOD:
        values: tuple[Any, ...] = getattr(settings_of(method), OF_THE_METHOD[key][1])
        return values
    return choices_of(table, key)


def unread_by_hand(flat: Mapping[str, Any], method: str, by_hand: Collection[str]) -> list[str]:
    """Return an error line for each key that was given by hand but is not read."""
    if not by_hand:
        return []
    found = unread(flat)
    values = default_values() | dict(flat)
    lines = []
    for key in sorted(by_hand):
        if not concerns(key, method) and key in default_values():
            lines.append(_unread(key, flat[key], method))
        elif not concerns(key, method):
            lines.append(unknown_key(key, keys_in_order(method)))
        elif key in found:
            choice, remedy = found[key]
            if choice == "federation.aggregation-rule" and values["federation.secure-sum"] is True:
                # Secure sums have one rule, so the remedy would be refused.
                choice, remedy = "federation.secure-sum", "federation.secure-sum = false"
            why = f"{choice} = {_quoted(values[choice])} does not read it"
            lines.append(f"{key} = {_quoted(flat[key])}: {why}; leave it out, or choose {remedy}")
    return lines


def _reads(method: str, table: str, name: str) -> bool:
    """Return whether a method reads a key; of a shared table it may read only some."""
    own = settings_of(method)
    if table == "federation":
        return name in own.FEDERATION
    if all_shared_keys().get(name) == table:
        return name in shared_keys(own)
    return table in tables_of(method)


def _unread(key: str, value: Any, method: str) -> str:
    """Return the error line for a key by hand whose table the method does not read."""
    table, _, name = key.partition(".")
    readers = [other for other in sorted(METHODS) if _reads(other, table, name)]
    kinds = tables()
    namesakes = [
        f"{own}.{name}" for own in tables_of(method) if name in keys_of_table(own, kinds[own])
    ]
    remedies = [f"set {' or '.join(namesakes)}"] if namesakes else ["leave it out"]
    remedies.append(f"choose method = {' or '.join(map(repr, readers))}")
    why = f"method = {method!r} does not read it"
    return f"{key} = {_quoted(value)}: {why}; {', or '.join(remedies)}"
