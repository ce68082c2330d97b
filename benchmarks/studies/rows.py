"""Measured cells of a study in a CSV file, to which an interrupted study adds rows."""

import csv
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.reporting.conditions import together
from benchmarks.studies.cells import Cell, Setting
from espalier.errors import InputError
from espalier.storage.atomic import write_bytes, write_json

COLUMNS = (
    "seed", "clients", "samples", "sparsity", "local_group", "method", "server_group", "weight_scaling", "text",
    "perplexity", "achieved_sparsity", "models",
)  # fmt: skip


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


class Rows:
    """Rows of a CSV file, which is created if missing.

    Parameters
    ----------
    path : path of the CSV file; the conditions are in a JSON file next to it
    conditions : conditions of the measurement as JSON values, with ``texts`` by name; rows of other
        conditions are refused, but texts may be added or left out

    Raises
    ------
    InputError
        The file has rows of other conditions, lacks its conditions, or is damaged.
    """

    def __init__(self, path: Path, conditions: Mapping[str, Any]) -> None:
        self.path = path
        self.conditions = dict(conditions)
        self.rows: list[Row] = []
        beside = path.with_suffix(".json")
        if path.exists() != beside.exists():
            there, missing = (path, beside) if path.exists() else (beside, path)
            raise InputError(
                f"{there}: {missing.name} is missing; restore it, or move this file away"
            )
        if path.exists():
            self._require_conditions(beside)
            self._read()
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_bytes(path, (",".join(COLUMNS) + "\n").encode())
            write_json(beside, self.conditions)

    def _require_conditions(self, beside: Path) -> None:
        try:
            found = json.loads(beside.read_text())
        except ValueError:
            raise InputError(f"{beside}: is damaged; move it and {self.path.name} away") from None
        self.conditions, differ = together(found, self.conditions)
        if differ:
            raise InputError(
                f"{self.path}: was measured with other {', '.join(differ)}; move it away or give"
                " another --out"
            )
        if found != self.conditions:
            write_json(beside, self.conditions)

    def _read(self) -> None:
        """Read the rows; an incomplete last line is dropped, also from the file."""
        lines = self.path.read_text().splitlines(keepends=True)
        whole = [line for line in lines if line.endswith("\n")]
        for number, record in enumerate(csv.DictReader(whole), start=2):
            try:
                self.rows.append(_read(record))
            except (KeyError, TypeError, ValueError):
                raise InputError(
                    f"{self.path}: line {number} is damaged; restore or remove it"
                ) from None
        if len(whole) < len(lines):
            write_bytes(self.path, "".join(whole).encode())

    def missing(self, cell: Cell, texts: Iterable[str]) -> list[str]:
        """Return the texts on which a cell was not measured yet."""
        known = {row.text for row in self.rows if row.cell == cell}
        return [text for text in texts if text not in known]

    def add(self, rows: Iterable[Row]) -> None:
        """Append rows, and write them immediately."""
        new = list(rows)
        with open(self.path, "a", newline="") as file:
            csv.DictWriter(file, COLUMNS, lineterminator="\n").writerows(map(_written, new))
        self.rows += new

    def texts(self) -> list[str]:
        """Return the names of the texts, in order of measurement."""
        return list(dict.fromkeys(row.text for row in self.rows))


def _written(row: Row) -> dict[str, object]:
    cell = {key: value for key, value in asdict(row.cell).items() if key != "setting"}
    cell["weight_scaling"] = "on" if row.cell.weight_scaling else "off"
    figures = {
        "perplexity": f"{row.perplexity:.6g}",
        "achieved_sparsity": f"{row.achieved_sparsity:.6f}",
        "models": row.models,
    }
    return {**asdict(row.cell.setting), **cell, "text": row.text, **figures}


def _read(record: dict[str, str]) -> Row:
    setting = Setting(
        int(record["seed"]),
        int(record["clients"]),
        int(record["samples"]),
        float(record["sparsity"]),
        record["local_group"],
    )
    cell = Cell(setting, record["method"], record["server_group"], record["weight_scaling"] == "on")
    figures = float(record["perplexity"]), float(record["achieved_sparsity"]), int(record["models"])
    return Row(cell, record["text"], *figures)
