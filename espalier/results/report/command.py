"""``espalier report``: write the report of runs, and measure their models on request."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from espalier.environment.paths import at_home
from espalier.errors import InputError, as_command
from espalier.results.finished_run import FinishedRun, open_run
from espalier.results.report.page import FILE, write_report
from espalier.results.speed import measure


@as_command
def main(document: Mapping[str, Any]) -> None:
    """Write the reports and print their paths.

    Parameters
    ----------
    document : ``directories`` of the runs, ``out`` (a file, or None), ``measure`` and ``base``
    """
    if document["base"] and not document["measure"]:
        raise InputError(f"--base {document['base']}: is read with --measure only; add that")
    runs = [open_run(directory) for directory in document["directories"]]
    out = _target(document["out"], runs)
    for run in runs:
        if document["measure"]:
            measure(run, base=document["base"])
        path = out or run.path / FILE
        write_report(run, path)
        print(f"{path}: written", flush=True)


def _target(given: str | None, runs: list[FinishedRun]) -> Path | None:
    if given is None:
        return None
    if len(runs) > 1:
        raise InputError(
            f"--out {given}: there are {len(runs)} runs, and each has a report of its own; name one"
            " run, or leave out --out"
        )
    path = at_home(given).absolute()
    if not path.parent.is_dir():
        raise InputError(f"--out {given}: {path.parent} is not a directory; create it first")
    if path.is_dir():
        raise InputError(f"--out {given}: is a directory; name a file in it")
    return path
