"""Chain of runs behind a result: a run may prune a model that another run then tunes."""

from pathlib import Path

from espalier.errors import EspalierError
from espalier.results.base_chain import KEY
from espalier.results.finished_run import FinishedRun, open_run
from espalier.results.run_status import is_run


def runs_behind(run: FinishedRun) -> list[FinishedRun]:
    """Return the runs that led to a result, the oldest first and ``run`` last.

    A run belongs to the chain if its directory is still where the summary of the next names it.
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
    folder = chain[0].get("run")
    if not folder or not is_run(Path(folder)):
        return None
    try:
        return open_run(folder)
    except EspalierError:
        return None
