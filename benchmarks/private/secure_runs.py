"""Processor time of whole runs with secure sums, next to the same runs without them.

    python -m benchmarks.private.secure_runs [--methods pooled-pruning ...] [--clients 3 8 32]
        [--turns 3]

The demo model, one round, 32 samples of 128 tokens per client or five training steps of four
sequences, and no baseline, all in this process on one thread. The evaluation, which is the same
with and without secure sums, has one sample. Runs with and without take turns, after a run of each
that does not count. Prints a Markdown table with the medians of processor seconds of all clients,
and of the server, and their ratio.
"""

import contextlib
import io
import os
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Any

from flwr.app import Context, Message, RecordDict

from benchmarks.study_command import exit_status, new_parser
from client_app.app import app
from server_app.app import run_method
from tests.in_process import InProcessGrid

COMMON: dict[str, Any] = {
    "threads": 1, "evaluation.local-baseline": False, "evaluation.centralized": "off",
    "evaluation.max-samples": 1, "evaluation.sequence-length": 128, "data.sequence-length": 128,
    "data.source": "documentation", "enrol-seconds": 3600.0,
}  # fmt: skip
SAMPLES = {"data.num-samples": 32}
TRAINING = {"federation.rounds": 1, "training.steps": 5, "training.batch-size": 4}
METHODS: dict[str, dict[str, Any]] = {
    "pooled-pruning": SAMPLES,
    "fedprllm": SAMPLES,
    "fedpetuning": TRAINING,
}


class TimedGrid(InProcessGrid):
    """Grid that adds up the processor seconds of all clients."""

    seconds = 0.0

    def answer(self, message: Message, context: Context) -> Message:
        """Return a node's reply, and time it."""
        started = time.process_time()
        reply = super().answer(message, context)
        self.seconds += time.process_time() - started
        return reply


def seconds_of(settings: dict[str, Any]) -> tuple[float, float]:
    """Return the processor seconds of a run: of all its clients, and of the server."""
    clients = settings["num-clients"]
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        os.environ["ESPALIER_STATE_DIR"] = str(Path(folder) / "state")
        settings = settings | {"out-dir": str(Path(folder) / "runs")}
        nodes = [{"partition-id": client, "num-partitions": clients} for client in range(clients)]
        grid = TimedGrid(app, nodes, settings)
        started = time.process_time()
        run_method(grid, Context(1, 0, {}, RecordDict(), settings))
        return grid.seconds, time.process_time() - started - grid.seconds


def rows(methods: Iterable[str], clients: Iterable[int], turns: int) -> Iterable[str]:
    """Yield the lines of the table."""
    yield "| method | clients | plain, s: clients + server | secure, s: clients + server | ratio |"
    yield "|---|---|---|---|---|"
    for method in methods:
        for number in clients:
            settings = {**COMMON, **METHODS[method], "method": method, "num-clients": number}
            pairs = [
                (seconds_of(settings), seconds_of(settings | {"federation.secure-sum": True}))
                for _ in range(turns + 1)
            ][1:]
            plain, secure = (
                [median(part) for part in zip(*one, strict=True)]
                for one in zip(*pairs, strict=True)
            )
            yield (
                f"| {method} | {number} | {plain[0]:.1f} + {plain[1]:.1f} |"
                f" {secure[0]:.1f} + {secure[1]:.1f} | {sum(secure) / sum(plain):.2f} |"
            )


def main() -> int:
    """Measure, and return the exit code."""
    parser = new_parser("benchmarks.private.secure_runs", __doc__)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--clients", nargs="+", type=int, default=[3, 8, 32])
    parser.add_argument("--turns", type=int, default=3)
    given = parser.parse_args()

    def work() -> None:
        for line in rows(given.methods, given.clients, given.turns):
            print(line, flush=True)

    return exit_status(work)


if __name__ == "__main__":
    sys.exit(main())
