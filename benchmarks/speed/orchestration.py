"""Overhead of Flower, Ray and processes over the work itself.

    python -m benchmarks.speed.orchestration [--method fedprllm] [--clients 4] [--samples 4]
    [--model DIRECTORY]

The same run of iterative pruning (a round per block) or of federated LoRA is done four times, all
on this machine: in one process, where messages are function calls; as a simulation with ``espalier
run``; on a SuperLink with Flower's SuperNodes, which start a process for every message; and with
``espalier node``, which stays warm. The wall time of each is split into columns that add up to it
(``split``) and compared with that of one process. The table also has the first round and the mean
of the later ones. The results must have equal bytes.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.processes.deployment import espalier, federation

ROOT = Path(__file__).parents[2]

IN_ONE_PROCESS = """
import sys, tomllib
from pathlib import Path
from flwr.app import Context, RecordDict
from espalier.launch.configuration import flatten
from client_app.app import app
from server_app.app import run_method
from tests.in_process import InProcessGrid

config = flatten(tomllib.loads(Path(sys.argv[1]).read_text()))
clients = config["num-clients"]
nodes = [{"partition-id": client, "num-partitions": clients} for client in range(clients)]
run_method(InProcessGrid(app, nodes, config), Context(1, 0, {}, RecordDict(), config))
"""


METHODS = {
    "fedprllm": (
        ["pruning.strategy=iterative", "evaluation.centralized=off"],
        ("masks", "voting"),
        ("masks.safetensors", "model/*.safetensors"),
    ),
    "fedpetuning": (
        [
            "method=fedpetuning",
            "federation.rounds=5",
            "training.steps=4",
            "training.batch-size=2",
            "evaluation.centralized=off",
        ],
        ("trained", "averaging"),
        ("adapter/*.safetensors",),
    ),
}
"""For each method: settings, the events of client work and of the next server step, and results."""


def measure(
    folder: Path,
    method: str,
    work: Callable[[], subprocess.CompletedProcess[str]],
    at_once: bool = True,
) -> dict[str, Any]:
    """Time a run, and read the durations of its parts from its directory.

    ``at_once`` is True if clients work at the same time.
    """
    folder.mkdir(parents=True, exist_ok=True)
    started_at = time.time()
    started = time.perf_counter()
    done = work()
    wall = time.perf_counter() - started
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    (run,) = (folder / "runs").iterdir()
    events = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    at = [
        (event, datetime.fromisoformat(event["time"]).timestamp() - started_at) for event in events
    ]
    first = next(when for event, when in at if event["event"] == "method")
    rounds = [first, *(when for event, when in at if event["event"] == "checkpoint")]
    lengths = [after - before for before, after in pairwise(rounds)]
    return {
        "wall": wall,
        **split(at, wall, at_once, METHODS[method][1]),
        "first round": lengths[0],
        "later rounds": sum(lengths[1:]) / len(lengths[1:]),
        "bytes": [
            file.read_bytes()
            for pattern in METHODS[method][2]
            for file in sorted(run.glob(pattern))
        ],
    }


def split(
    events: Sequence[tuple[dict[str, Any], float]],
    wall: float,
    at_once: bool,
    steps: tuple[str, str] = ("masks", "voting"),
) -> dict[str, float]:
    """Split the wall time of a run into parts that add up to it.

    Parameters
    ----------
    events : the run's events, each with the seconds since its start
    wall : seconds from start to end of the command
    at_once : True if clients work at the same time, so that the busiest client's work counts, not
        the sum over clients
    steps : names of the event of client work and of the next server step

    Returns
    -------
    dict
        ``start-up``: processes, Ray, imports and enrolment until the first round; ``clients``:
        their work in the rounds; ``waiting``: further time until their replies; ``server``: votes,
        checkpoints, export and evaluation; ``evaluation``: by the clients; ``end``: after the last
        event
    """
    own_work, of_server = steps
    worked = {
        event["client"]: event["seconds"]
        for event, _ in events
        if event["event"] == own_work
        # An event has the seconds of all rounds so far, so the last one counts.
    }
    work = max(worked.values()) if at_once else sum(worked.values())
    begun = next(when for event, when in events if event["event"] == "method")
    rounds = 0.0
    own = 0.0
    since = begun
    voting = begun
    for event, when in events:
        if event["event"] == "begin" and event["title"] == of_server:
            rounds = rounds + when - since
            voting = when
        elif event["event"] == "checkpoint":
            own = own + when - voting
            since = when
    evaluated = max(
        [when for event, when in events if event["event"] == "local_baseline"], default=since
    )
    last = events[-1][1]
    return {
        "start-up": begun,
        "clients": work,
        "waiting": rounds - work,
        "server": own + last - evaluated,
        "evaluation": evaluated - since,
        "end": wall - last,
    }


def main() -> None:
    """Run all four and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--method", choices=METHODS, default="fedprllm")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument(
        "--samples", type=int, default=4, help="of calibration, which LoRA has none of"
    )
    parser.add_argument("--model", default="demo")
    given = parser.parse_args()
    words = [
        *METHODS[given.method][0], f"num-clients={given.clients}", "evaluation.max-samples=8",
        f"model={given.model}", "--app", str(ROOT),
    ]  # fmt: skip
    if given.method == "fedprllm":
        words.insert(0, f"data.num-samples={given.num_samples}")
    with tempfile.TemporaryDirectory() as scratch:
        found = _all_four(Path(scratch), given, words)
    if len({tuple(one.pop("bytes")) for one in found.values()}) != 1:
        raise SystemExit("the results differ")
    columns = (
        "wall",
        "start-up",
        "clients",
        "waiting",
        "server",
        "evaluation",
        "end",
        "first round",
        "later rounds",
    )
    print(f"{given.clients} clients, {given.method}, equal bytes; seconds\n")
    print(
        "| | "
        + " | ".join(columns)
        + " | wall, of one process |\n|---|"
        + "---|" * (len(columns) + 1)
    )
    for name, figures in found.items():
        ratio = figures["wall"] / found["one process"]["wall"]
        print(
            f"| {name} | "
            + " | ".join(f"{figures[column]:.1f}" for column in columns)
            + f" | {ratio:.1f} |"
        )


def _all_four(
    folder: Path, given: argparse.Namespace, words: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """Return the measurements of the four runs, by name."""
    found = {
        "simulation": measure(
            folder / "sim", given.method, lambda: espalier(folder / "sim", "run", *words)
        )
    }
    settings = next((folder / "sim" / "runs").iterdir()) / "settings.toml"
    sites = [f"node-{client:05d}" for client in range(given.clients)]
    own = dict.fromkeys(sites, "" if given.model == "demo" else f'model-path="{given.model}"')
    for name, warm in (("flower-supernode", ()), ("espalier node", sites)):
        home = folder / name.replace(" ", "-")
        home.mkdir()
        with federation(home, sites, own, warm) as deployed:
            command = ("run", *words, "--superlink", deployed.control)
            found[name] = measure(home, given.method, partial(espalier, home, *command))
    alone = folder / "alone"
    alone.mkdir()
    text = "".join(
        f'out-dir = "{alone / "runs"}"\n' if line.startswith("out-dir") else line
        for line in settings.read_text().splitlines(keepends=True)
    )
    (alone / "settings.toml").write_text(text)
    environment = {
        **os.environ,
        "ESPALIER_STATE_DIR": str(alone / "state"),
        "PYTHONPATH": str(ROOT),
    }
    command_alone = [sys.executable, "-c", IN_ONE_PROCESS, str(alone / "settings.toml")]
    found["one process"] = measure(
        alone,
        given.method,
        lambda: subprocess.run(
            command_alone, env=environment, cwd=ROOT, capture_output=True, text=True
        ),
        at_once=False,
    )
    return found


if __name__ == "__main__":
    main()
