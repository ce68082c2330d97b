"""``espalier report``: write the report of runs, and measure their models on request."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from espalier.environment.paths import at_home
from espalier.errors import EspalierError, InputError, as_command, tell
from espalier.results.finished_run import open_run
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
    given = document["directories"]
    out = _target(document["out"], given)
    failed = 0
    for directory in given:
        try:
            path = _write(directory, out, document)
        except EspalierError as error:
            if len(given) == 1:
                raise
            # The others get their reports.
            tell(error)
            failed += 1
        else:
            print(f"{path}: written", flush=True)
    if failed:
        raise InputError(f"{failed} of {len(given)} directories have got no report; see above")


def _write(directory: str, out: Path | None, document: Mapping[str, Any]) -> Path:
    run = open_run(directory)
    if document["measure"]:
        measure(run, base=document["base"])
    path = out or run.path / FILE
    write_report(run, path)
    return path


def _target(given: str | None, directories: Sequence[str]) -> Path | None:
    if given is None:
        return None
    if len(directories) > 1:
        raise InputError(
            f"--out {given}: there are {len(directories)} runs, and each has a report of its own;"
            " name one run, or leave out --out"
        )
    path = at_home(given).absolute()
    if not path.parent.is_dir():
        raise InputError(f"--out {given}: {path.parent} is not a directory; create it first")
    if path.is_dir():
        raise InputError(f"--out {given}: is a directory; name a file in it")
    return path
