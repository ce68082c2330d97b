"""Measurement at the end of ``espalier run``: base model and result, then the report again."""

from collections.abc import Mapping
from typing import Any

from espalier.amounts import size
from espalier.errors import EspalierError, as_command
from espalier.hf.machine.machine_memory import machine_memory
from espalier.results.figures import DENSE, size_of
from espalier.results.finished_run import FinishedRun, open_run
from espalier.results.report.page import FILE, write_report
from espalier.results.speed import measure

LIBRARIES = 1 << 30
"""Bytes that a process needs for Python, torch and activations, besides the weights."""


@as_command
def main(document: Mapping[str, Any]) -> None:
    """Measure the models of a completed run, unless the base model may not fit into memory.

    Of models of clients only the first is measured. A model that cannot be measured does not make
    the run fail; a line says why.

    Parameters
    ----------
    document : ``directory`` of the run
    """
    try:
        run = open_run(document["directory"])
        if reason := _too_large(run):
            print(f"not measured {reason}", flush=True)
            return
        measure(run, max_clients=1)
        write_report(run, run.path / FILE)
        print(f"the report with these figures is in {run.path / FILE}", flush=True)
    except EspalierError as error:
        print(f"not measured memory and speed: {error}", flush=True)


def _too_large(run: FinishedRun) -> str:
    """Return why the base model may not fit into the free memory; empty if it fits."""
    weights = size_of(run, DENSE).num_bytes
    _, free = machine_memory()
    if weights is None or weights + LIBRARIES <= free:
        return ""
    return (
        f"memory and speed: base model and libraries need {size(weights + LIBRARIES)}, and"
        f" {size(free)} are free"
    )
