"""Chain of runs behind a result: a run may prune a model that another run then tunes."""

from pathlib import Path

from espalier.errors import EspalierError
from espalier.results.base_chain import KEY
from espalier.results.finished_run import FinishedRun, open_run
from espalier.results.run_status import is_run


def runs_behind(run: FinishedRun) -> list[FinishedRun]:
    """Return the runs that led to a result, the oldest first and ``run`` last.

    A run belongs to the chain if its directory is still where the summary of the next names it, or
    beside the directory of the next.
    """
    chain = [run]
    seen = {run.path.resolve()}
    while (before := _run_before(chain[0])) is not None and before.path.resolve() not in seen:
        seen.add(before.path.resolve())
        chain.insert(0, before)
    return chain


def _run_before(run: FinishedRun) -> FinishedRun | None:
    """Return the run that wrote the base model of a run; None if no run did, or it is gone."""
    chain = run.summary.get(KEY) or [{}]
    if not (named := chain[0].get("run")):
        return None
    for folder in (Path(named), _beside(run, Path(named))):
        try:
            if is_run(folder):
                return open_run(folder)
        except EspalierError:
            continue
    return None


def _beside(run: FinishedRun, folder: Path) -> Path:
    """Return where a run directory is if it was moved together with a later run."""
    return run.path.parent / folder.name


def has_original_base(run: FinishedRun) -> bool:
    """Return whether no run made the base model of a run."""
    chain = run.summary.get(KEY) or [{}]
    return not chain[0].get("run")


def moved_base(run: FinishedRun) -> Path | None:
    """Return the base model of a run if both were moved together; None if it is not found.

    The caller compares hashes: another run may have this name.
    """
    chain = run.summary.get(KEY) or [{}]
    named, model = chain[0].get("run"), chain[0].get("path")
    if not named or not model or not Path(model).is_relative_to(named):
        return None
    place = _beside(run, Path(named)) / Path(model).relative_to(named)
    return place if (place / "config.json").is_file() else None
