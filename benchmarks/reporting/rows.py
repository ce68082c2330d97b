"""Measurements of a study in a CSV file, to which an interrupted study adds rows."""

import csv
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.reporting.conditions import together
from espalier.errors import InputError
from espalier.storage.atomic import write_bytes, write_json

Row = dict[str, str]


class Rows:
    """Rows of a CSV file, which is created if missing.

    Parameters
    ----------
    path : path of the CSV file; the conditions are in a JSON file next to it
    keys : columns that identify a row
    figures : columns with measured values
    conditions : conditions of the measurement; rows of other conditions are refused, but texts may
        be added or left out

    Raises
    ------
    InputError
        The file has rows of other conditions, lacks its conditions, or is damaged.
    """

    def __init__(
        self,
        path: Path,
        keys: tuple[str, ...],
        figures: tuple[str, ...],
        conditions: Mapping[str, Any],
    ) -> None:
        self.path = path
        self.keys = keys
        self.figures = figures
        self.conditions = dict(conditions)
        self.rows: list[Row] = []
        beside = path.with_name(f"{path.name.removesuffix('.csv')}.json")
        if path.exists():
            self._require_conditions(beside)
            self._read()
        elif beside.exists():
            raise InputError(
                f"{beside}: {path.name} is missing; restore it, or move this file away"
            )
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(beside, self.conditions)
            path.write_text(",".join(keys + figures) + "\n")

    def _require_conditions(self, beside: Path) -> None:
        if not beside.exists():
            raise InputError(
                f"{self.path}: {beside.name} is missing; restore it, or move this file away"
            )
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
        for number, row in enumerate(csv.DictReader(whole), start=2):
            try:
                for name in self.figures:
                    float(row[name] or 0)
            except (KeyError, TypeError, ValueError):
                raise InputError(
                    f"{self.path}: line {number} is damaged; restore or remove it"
                ) from None
            self.rows.append(row)
        if len(whole) < len(lines):
            write_bytes(self.path, "".join(whole).encode())

    def missing(self, cells: Iterator[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the cells that were not measured yet."""
        known = {tuple(row[key] for key in self.keys) for row in self.rows}
        return [cell for cell in cells if tuple(str(cell[key]) for key in self.keys) not in known]

    def add_all(
        self, measured: Iterable[tuple[Mapping[str, Any], Mapping[str, float | None]]]
    ) -> None:
        """Record those cells that are missing."""
        for cell, figures in measured:
            if self.missing(iter([dict(cell)])):
                self.add(cell, **figures)

    def add(self, cell: Mapping[str, Any], **figures: float | None) -> None:
        """Record a measured cell; figures that it lacks are None and stay empty."""
        measured = {name: figures[name] for name in self.figures}
        row = {key: str(cell[key]) for key in self.keys}
        row |= {name: "" if value is None else f"{value:.6g}" for name, value in measured.items()}
        with open(self.path, "a", newline="") as file:
            csv.DictWriter(file, self.keys + self.figures, lineterminator="\n").writerow(row)
        self.rows.append(row)
        print(", ".join(f"{name} {value}" for name, value in row.items()), flush=True)
