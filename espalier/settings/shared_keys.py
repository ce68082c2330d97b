"""Keys that several methods share: ``[pruning]``, ``[public]`` and ``lora.ranks``.

They are written in a table of their own, so that a run of another method needs no other keys, and
become fields of the chosen method's settings, which may narrow their values.
"""

from collections.abc import Mapping
from typing import ClassVar, get_args

from pydantic.fields import FieldInfo

from espalier.settings.method import MethodSettings, PublicTextSettings
from espalier.settings.pruning import (
    MaskingSettings,
    PersonalModelSettings,
    Selection,
    StructuredSettings,
    ratio_field,
)
from espalier.settings.table import ReadWith, Table


class PruningTable(PersonalModelSettings, MaskingSettings, StructuredSettings):
    """Table ``[pruning]``: how much is removed, and what competes."""

    READ_WITH: ClassVar[ReadWith] = {
        "sparsity": {"pattern": ("",)},
        "comparison-group": {"pattern": ("",)},
    }

    # The method's own settings say what ``auto`` stands for.
    SELECTIONS: ClassVar[tuple[Selection, ...]] = get_args(Selection)

    pruning_ratio: float = ratio_field(ge=0, lt=1)


class PublicTable(PublicTextSettings):
    """Table ``[public]``: text that the server reads."""


TABLES: Mapping[str, type[Table]] = {"pruning": PruningTable, "public": PublicTable}
"""Tables that consist of shared keys."""
_FIELDS = {
    **{field: table for table, kind in TABLES.items() for field in kind.model_fields},
    "ranks": "lora",
}
"""Table of each shared key, by the field of a method's settings."""


def fields_by_key(kind: type[Table]) -> dict[str, FieldInfo]:
    """Return the fields of a table by their keys, with hyphens."""
    return {field.alias or name: field for name, field in kind.model_fields.items()}


def shared_keys(kind: type[MethodSettings]) -> dict[str, str]:
    """Return the keys that a method shares with others, with the table of each."""
    return {
        field.alias or name: _FIELDS[name]
        for name, field in kind.model_fields.items()
        if name in _FIELDS
    }


def all_shared_keys() -> dict[str, str]:
    """Return all shared keys, with the table of each."""
    return {
        **{key: table for table, kind in TABLES.items() for key in fields_by_key(kind)},
        "ranks": "lora",
    }
