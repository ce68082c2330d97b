"""Study of complete runs on your own model and texts: command line, conditions and runs."""

import argparse
import contextlib
import io
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flwr.app import Context, RecordDict

from benchmarks import study_command
from benchmarks.reporting.perplexity_report import Study
from benchmarks.reporting.rows import Rows
from benchmarks.study_command import model_conditions, text_conditions
from client_app.app import app
from espalier.data.public_text import public_samples
from espalier.errors import InputError
from espalier.hf.opening.opened_model import open_model
from espalier.settings.run import parse
from espalier.storage.atomic import write_json
from espalier.storage.blobs import sha256
from server_app.app import run_method
from tests.in_process import InProcessGrid, Tamper

SAMPLES = 32
"""Number of calibration samples of a client."""


@dataclass(frozen=True)
class Bench:
    """Common data of all cells."""

    common: Mapping[str, Any]
    """Settings of every run, flat."""
    model: str
    private: Sequence[Path]
    seeds: Sequence[int]
    work: Path
    """Folder of the runs."""

    def dealt(self) -> Path:
        """Link the clients' texts under names with their numbers; return the path pattern."""
        folder = self.work / "private"
        folder.mkdir(parents=True, exist_ok=True)
        for client, file in enumerate(self.private):
            link = folder / f"{client}.txt"
            if not link.exists():
                link.symlink_to(file.absolute())
        return folder / "{client}.txt"

    def pooled(self) -> Path:
        """Write all clients' texts to one file, and return its path."""
        path = self.work / "private" / "all.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            "\n\n".join(file.read_text(encoding="utf-8") for file in self.private), encoding="utf-8"
        )
        return path

    def run(
        self, name: str, varied: Mapping[str, Any], tamper: Mapping[int, Tamper] | None = None
    ) -> Path:
        """Return the directory of a completed run with these settings; do the run if it is missing.

        ``tamper`` changes the replies of some clients; ``name`` should tell it.

        Raises
        ------
        InputError
            The run under this name has other settings.
        """
        folder = self.work / name
        settings = {
            **self.common,
            **varied,
            "out-dir": str(folder / "runs"),
            "enrol-seconds": 600.0,
        }
        asked = {key: value for key, value in settings.items() if key != "out-dir"}
        if (made := self._completed(name)) is not None:
            _require_same(folder / "asked.json", asked)
            return made
        write_json(folder / "asked.json", asked)
        os.environ["ESPALIER_STATE_DIR"] = str(folder / "state")
        number = int(varied.get("num-clients", len(self.private)))
        nodes = [{"partition-id": client, "num-partitions": number} for client in range(number)]
        with contextlib.redirect_stdout(io.StringIO()):
            grid = InProcessGrid(app, nodes, settings)
            grid.tamper |= tamper or {}
            return run_method(grid, Context(1, 0, {}, RecordDict(), settings))

    def made(self, name: str) -> Path:
        """Return the directory of an existing run.

        Raises
        ------
        InputError
            It does not exist.
        """
        if (found := self._completed(name)) is None:
            raise InputError(
                f"{self.work / name}: holds no completed run; do the study first that makes it,"
                " with the same --work"
            )
        return found

    def _completed(self, name: str) -> Path | None:
        summaries = (self.work / name).glob("runs/*/summary.json")
        return next(
            (
                found.parent
                for found in summaries
                if json.loads(found.read_text())["status"] == "completed"
            ),
            None,
        )


def _require_same(path: Path, settings: Mapping[str, Any]) -> None:
    """Compare the settings of an existing run with the wanted ones.

    Raises
    ------
    InputError
        They differ, or those of the existing run are unknown.
    """
    if not path.exists():
        raise InputError(
            f"{path.parent}: holds a run of which nobody knows what it was asked for; give another"
            " --work"
        )
    found = json.loads(path.read_text())
    if differ := sorted(
        key for key in found.keys() | settings.keys() if found.get(key) != settings.get(key)
    ):
        raise InputError(
            f"{path.parent}: holds a run with another {', '.join(differ)}; give another --work, or"
            " remove it"
        )


def add_arguments(parser: argparse.ArgumentParser, work: str, threads: int) -> None:
    """Add the common command-line arguments; ``work`` and ``threads`` are defaults."""
    names = "model text sequence-length max-samples seeds threads work out"
    study_command.add_arguments(parser, names, threads=threads, work=Path(work))
    parser.add_argument(
        "--private", required=True, action="append", type=Path, help="the text of one client"
    )


def measure(
    given: argparse.Namespace,
    study: Study,
    path: Path,
    settings: Mapping[str, Any],
    stated: Mapping[str, Any],
) -> tuple[Rows, dict[str, Any]]:
    """Measure missing rows of a study.

    Parameters
    ----------
    given : arguments of ``add_arguments``
    study : study to measure
    path : path of the results without a suffix; they are written row by row
    settings : settings of every run, in addition to the common ones
    stated : conditions of this study, in addition to the common ones

    Returns
    -------
    tuple
        The rows, and the conditions under which they were measured

    Raises
    ------
    InputError
        A setting or file is wrong, or existing rows were measured under other conditions.
    """
    common = {
        "model": given.model,
        "threads": given.threads,
        "evaluation.texts": ",".join(given.text),
        "evaluation.sequence-length": given.sequence_length,
        "evaluation.max-samples": given.max_samples,
        "evaluation.local-baseline": False,
        "evaluation.centralized": "off",
        **settings,
    }
    parsed = parse(common)
    model = open_model(parsed.model)
    texts = public_samples(parsed.evaluation, model.encode)
    conditions = {
        "model": model_conditions(model, "weights"),
        "private": {file.name: sha256(_read(file)) for file in given.private},
        "texts": text_conditions(texts),
        "samples": SAMPLES,
        "sequence_length": given.sequence_length,
        **stated,
        "threads": given.threads,
    }
    rows = Rows(path.with_suffix(".csv"), study.keys, study.figures, conditions)
    study.work(Bench(common, given.model, given.private, given.seeds, given.work.absolute()), rows)
    return rows, conditions


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise InputError(
            f"--private {file}: cannot be read ({error.strerror}); name the text of a client"
        ) from None
