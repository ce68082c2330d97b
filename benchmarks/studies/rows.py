"""The measured cells of a study: a CSV file that grows row by row, so that an interrupted study goes on."""

import csv
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.conditions import together
from benchmarks.studies.cells import Cell, Setting
from espalier.settings.mistakes import Mistake
from espalier.storage.atomic import write_bytes, write_json

COLUMNS = (
    "seed", "clients", "windows", "sparsity", "local_group", "method", "server_group", "weight_scaling", "text",
    "perplexity", "achieved_sparsity", "models",
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """Perplexity of a cell on one text."""

    cell: Cell
    text: str
    perplexity: float
    """Mean over ``models``."""
    achieved_sparsity: float
    """Share of the prunable weights that are zero."""
    models: int
    """How many models were evaluated: one, or for ``local-only`` one per client that was asked."""


class Rows:
    """The rows of a CSV file, which is made if it is not there.

    Parameters
    ----------
    path : the CSV file; ``conditions`` lie beside it as JSON
    conditions : what the rows were measured with, JSON values, ``texts`` by name; rows of other conditions are refused, but
        texts may be added, or left out, from one time to the next

    Raises
    ------
    Mistake
        The file holds rows of other conditions, lacks its conditions, or is damaged.
    """

    def __init__(self, path: Path, conditions: Mapping[str, Any]) -> None:
        self.path = path
        self.conditions = dict(conditions)
        self.rows: list[Row] = []
        beside = path.with_suffix(".json")
        if path.exists() != beside.exists():
            there, missing = (path, beside) if path.exists() else (beside, path)
            raise Mistake(
                f"{there}: {missing.name} is not beside it; bring it back, or move this file away"
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
            raise Mistake(f"{beside}: is damaged; move it and {self.path.name} away") from None
        self.conditions, differ = together(found, self.conditions)
        if differ:
            raise Mistake(
                f"{self.path}: was measured with other {', '.join(differ)}; move it away or give"
                " another --out"
            )
        if found != self.conditions:
            write_json(beside, self.conditions)

    def _read(self) -> None:
        """Read the rows; what an interruption left of a last one is dropped, from the file too."""
        lines = self.path.read_text().splitlines(keepends=True)
        whole = [line for line in lines if line.endswith("\n")]
        for number, record in enumerate(csv.DictReader(whole), start=2):
            try:
                self.rows.append(_read(record))
            except (KeyError, TypeError, ValueError):
                raise Mistake(
                    f"{self.path}: line {number} is damaged; restore or remove it"
                ) from None
        if len(whole) < len(lines):
            write_bytes(self.path, "".join(whole).encode())

    def missing(self, cell: Cell, texts: Iterable[str]) -> list[str]:
        """Those texts on which a cell was not measured yet."""
        known = {row.text for row in self.rows if row.cell == cell}
        return [text for text in texts if text not in known]

    def add(self, rows: Iterable[Row]) -> None:
        """Append rows and write them down at once."""
        new = list(rows)
        with open(self.path, "a", newline="") as file:
            csv.DictWriter(file, COLUMNS, lineterminator="\n").writerows(map(_written, new))
        self.rows += new

    def texts(self) -> list[str]:
        """Names of the texts, in the order in which they were measured."""
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
        int(record["windows"]),
        float(record["sparsity"]),
        record["local_group"],
    )
    cell = Cell(setting, record["method"], record["server_group"], record["weight_scaling"] == "on")
    figures = float(record["perplexity"]), float(record["achieved_sparsity"]), int(record["models"])
    return Row(cell, record["text"], *figures)
