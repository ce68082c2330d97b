"""Memory and speed of a run's result and of its base model, each measured in a process of its own.

The models take turns, so that other work on the machine slows down all of them alike. The figures
are stored in the run directory (``measurements.json``). They belong to the machine, to its load at
that time and to the number of threads, which the file names.
"""

import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from espalier.amounts import size
from espalier.errors import InputError
from espalier.results.base_chain import KEY, read_chain, title_of
from espalier.results.figures import DENSE, FEDERATED
from espalier.results.finished_run import FinishedRun
from espalier.results.sources import Source, base_model_of, client_of, result_of
from espalier.storage.atomic import write_json

FILE = "measurements.json"
PROCESS = "espalier.results.measured_model"
"""Module that loads one model, and prints its figures as JSON."""
CONDITIONS = {"prompt_tokens": 128, "new_tokens": 32, "repetitions": 3, "batch_size": 1}
TURNS = 3
"""Most turns of each model."""
MAX_SECONDS = 60.0
"""Time after which no further turn starts."""
LARGER = ("prompt_tokens_per_second", "new_tokens_per_second")
SMALLER = ("model_memory", "peak_memory", "load_seconds")


def measure(run: FinishedRun, max_clients: int | None = None, base: str | None = None) -> None:
    """Measure the base model and the results of a run, and store the figures.

    Raises InputError if the run has no result, its base model is not on this machine or is another
    one, or a model cannot be loaded.

    Parameters
    ----------
    max_clients : number of clients whose own models are measured; None for all
    base : name of the base model; None takes the one of the run's settings
    """
    sources = _sources_of(run, max_clients, base)
    threads = int(run.summary.get("threads", 1))
    titles = {DENSE: title_of(read_chain(run.summary.get(KEY, ())))}
    told = ", ".join(titles.get(name, name) for name in sources)
    print(f"measuring    memory and speed of {told}", flush=True)
    figures = _in_turns(sources, threads)
    for name, found in figures.items():
        print(f"measured     {titles.get(name, name)}: {_in_words(found)}", flush=True)
    load = round(os.getloadavg()[0], 1)
    document = {
        **CONDITIONS,
        "threads": threads,
        "machine": platform.processor() or platform.machine(),
        "load": load,
        "cpus": os.cpu_count(),
        "models": [{"name": name, **found} for name, found in figures.items()],
    }
    write_json(run.path / FILE, document)
    if load > (os.cpu_count() or 1):
        print(f"note         the machine was busy (load {load}), so these speeds may be far off")


def _in_turns(sources: Mapping[str, Source], threads: int) -> dict[str, dict[str, Any]]:
    """Return the best figures of each model, by its name.

    Other work on the machine can only make them worse.
    """
    best: dict[str, dict[str, Any]] = {}
    started = time.monotonic()
    for turn in range(TURNS):
        if turn and time.monotonic() - started > MAX_SECONDS:
            break
        for name, source in sources.items():
            paths = {"model": source.directory}
            if source.adapter is not None:
                paths["adapter"] = source.adapter
            found = measured_apart(paths, CONDITIONS, threads)
            best[name] = better(best[name], found) if turn else found
    return best


def better(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Return the higher speeds and the smaller memory and time of two measurements of a model.

    A figure that one of them lacks is taken from the other one.
    """
    best = dict(one)
    for keys, choose in ((LARGER, max), (SMALLER, min)):
        for key in keys:
            known = [figures[key] for figures in (one, other) if figures[key] is not None]
            best[key] = choose(known, default=None)
    return best


def _in_words(figures: Mapping[str, Any]) -> str:
    clauses = [f"{size(figures['model_memory'])} of memory"]
    for key, what in (
        ("prompt_tokens_per_second", "prompt"),
        ("new_tokens_per_second", "generation"),
    ):
        if figures[key] is not None:
            clauses.append(f"{what} {figures[key]:,.1f} tokens/s")
    return ", ".join(clauses)


def measured_rows(run: FinishedRun) -> Mapping[str, Any]:
    """Return the stored figures, with a sentence on their ``conditions``; empty without figures."""
    document = run.json(FILE)
    if not document:
        return {}
    dtypes = ", ".join(dict.fromkeys(str(model["dtype"]) for model in document["models"]))
    conditions = (
        "Memory is what the loaded model adds to its process; the peak includes the libraries."
        f" The fastest of {document['repetitions']} or more repetitions at batch size"
        f" {document['batch_size']}: a prompt of {document['prompt_tokens']} tokens, and"
        f" {document['new_tokens']} generated tokens. {dtypes}, {document['threads']}"
        f" CPU threads, {document['machine']}."
    )
    # The load contains that of the measurement itself.
    if (load := document.get("load")) is not None:
        conditions += f" The load of the machine was {load} on {document['cpus']} CPUs."
        if load > document["cpus"]:
            conditions += " It was busy, so speeds may be far off; measure again."
    return {**document, "conditions": conditions}


def _sources_of(run: FinishedRun, max_clients: int | None, base: str | None) -> dict[str, Source]:
    """Return the base model and the results, by their names in the file."""
    results = {name: client_of(run, name) for name in list(run.client_models)[:max_clients]}
    if not results:
        results[FEDERATED] = result_of(run, base, same=True)
    return {DENSE: base_model_of(run, base, same=True), **results}


def measured_apart(
    paths: Mapping[str, str | Path], conditions: Mapping[str, Any], threads: int
) -> dict[str, Any]:
    """Measure one model in a new process.

    Raises InputError if the model cannot be loaded.

    Parameters
    ----------
    paths : ``model`` and, optionally, ``adapter``
    conditions : the keys of ``CONDITIONS``, and optionally ``dtype`` of the weights, by default
        that of the files
    threads : number of CPU threads
    """
    own = {key: str(path) for key, path in paths.items()}
    # The other process ends when this one does: then the pipe closes.
    reading, writing = os.pipe()
    document = {**own, **conditions, "threads": threads, "parent": reading}
    try:
        done = subprocess.run(
            # ``-P``: modules in the current directory must not replace those of libraries.
            [sys.executable, "-P", "-m", PROCESS],
            input=json.dumps(document),
            env={**os.environ, "OMP_NUM_THREADS": str(threads)},
            capture_output=True,
            text=True,
            check=False,
            pass_fds=(reading,),
        )
    finally:
        os.close(reading)
        os.close(writing)
    # Libraries may print too; the figures are the last object.
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        why = done.stderr.strip().rpartition("\n")[2] or f"exit code {done.returncode}"
        # A traceback ends with the class of the error.
        why = why.removeprefix(f"{InputError.__module__}.{InputError.__name__}: ")
        remedy = "check that transformers loads it"
        if done.returncode == -signal.SIGKILL:
            why, remedy = "the process was killed", "free memory, and measure again"
        raise InputError(
            f"{' with '.join(map(str, paths.values()))}: cannot be measured ({why}); {remedy}"
        )
    figures: dict[str, Any] = json.loads(lines[-1])
    return figures
