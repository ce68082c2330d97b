"""Measured cells of a study in a CSV file, to which an interrupted study adds rows."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.reporting import rows as reporting
from benchmarks.studies.cells import Cell, Setting

SETTING = ("seed", "clients", "samples", "sparsity", "local_group")
KEYS = (*SETTING, "method", "server_group", "weight_scaling", "text")
FIGURES = ("perplexity", "achieved_sparsity", "models")


@dataclass(frozen=True)
class Row:
    """Perplexity of a cell on one text."""

    cell: Cell
    text: str
    perplexity: float
    """Mean perplexity over ``models``."""
    achieved_sparsity: float
    """Fraction of the prunable weights that is zero."""
    models: int
    """Number of evaluated models: 1, or for ``local-baseline`` one per evaluated client."""


class Rows(reporting.Rows):
    """Rows of a study of FedPrLLM, as cells."""

    def __init__(self, path: Path, conditions: Mapping[str, Any]) -> None:
        super().__init__(path, KEYS, FIGURES, conditions)

    @property
    def measured(self) -> list[Row]:
        """Measured cells, in order of measurement."""
        return [_read(row) for row in self.rows]

    def missing_texts(self, cell: Cell, texts: Iterable[str]) -> list[str]:
        """Return the texts on which a cell was not measured yet."""
        return [row["text"] for row in self.missing(_key(cell, text) for text in texts)]

    def add_measured(self, rows: Iterable[Row]) -> None:
        """Append rows, and write them immediately."""
        for row in rows:
            figures = {name: getattr(row, name) for name in FIGURES}
            self.add(_key(row.cell, row.text), **figures)

    def texts(self) -> list[str]:
        """Return the names of the texts, in order of measurement."""
        return list(dict.fromkeys(row["text"] for row in self.rows))


def _key(cell: Cell, text: str) -> dict[str, Any]:
    scaling = "on" if cell.weight_scaling else "off"
    own = {"method": cell.method, "server_group": cell.server_group, "weight_scaling": scaling}
    return {**asdict(cell.setting), **own, "text": text}


def _read(row: reporting.Row) -> Row:
    types = (int, int, int, float, str)
    setting = Setting(*(kind(row[key]) for kind, key in zip(types, SETTING, strict=True)))
    cell = Cell(setting, row["method"], row["server_group"], row["weight_scaling"] == "on")
    figures = float(row["perplexity"]), float(row["achieved_sparsity"]), int(row["models"])
    return Row(cell, row["text"], *figures)
