"""Processor time of private work at a client, next to the same work without noise.

    python -m benchmarks.speed.private_steps --model DIRECTORY --data 'DIR/{client}.jsonl' \
        --test FILE --public FILE [--turns 3]

Two clients have records of Dolly. FedPETuning takes five steps of 32 sequences, or with DP-SGD of
32 on average. Pooled pruning watches 128 samples, or with differential privacy all records. Both
are complete runs of the app in this process, in turns, of which only the clients' work on their
data is timed; the seconds are divided by the number of sequences. Prints a Markdown table.
"""

import contextlib
import io
import json
import os
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

from flwr.app import Context, Message, RecordDict

from benchmarks.study_command import exit_status, new_parser
from client_app.app import app
from espalier.messages.records import read
from server_app.app import run_method
from tests.in_process import InProcessGrid

STEPS = 5
BATCH = 32
SAMPLES = 128
EPSILON = 4.0
COMMON: dict[str, Any] = {
    "num-clients": 2, "threads": 1, "data.source": "files",
    "evaluation.local-baseline": False, "evaluation.centralized": "off",
    "evaluation.max-samples": 1, "evaluation.sequence-length": 128, "enrol-seconds": 600.0,
}  # fmt: skip
TUNING = {
    "method": "fedpetuning", "task.name": "dolly", "task.max-tokens": 64, "task.max-test-items": 2,
    "training.steps": STEPS, "training.batch-size": BATCH, "lora.dropout": 0.0,
    "federation.client-weights": "equal", "federation.rounds": 1,
}  # fmt: skip
PRUNING = {
    "method": "pooled-pruning", "data.field": "response", "data.num-samples": SAMPLES,
    "data.sequence-length": 64,
}  # fmt: skip


class TimedGrid(InProcessGrid):
    """Grid that adds up the processor seconds of each kind of message at the clients."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.seconds: dict[str, float] = defaultdict(float)

    def answer(self, message: Message, context: Context) -> Message:
        """Return a node's reply, and time it."""
        started = time.process_time()
        reply = super().answer(message, context)
        self.seconds[read(message.content).header.kind] += time.process_time() - started
        return reply


def _seconds(settings: dict[str, Any]) -> float:
    """Return the processor seconds of both clients' work on their data in a run."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        os.environ["ESPALIER_STATE_DIR"] = str(Path(folder) / "state")
        nodes = [{"partition-id": client, "num-partitions": 2} for client in range(2)]
        grid = TimedGrid(app, nodes, {**settings, "out-dir": str(Path(folder) / "runs")})
        run_method(grid, Context(1, 0, {}, RecordDict(), settings | {"out-dir": folder}))
        return grid.seconds["train"]


def _work(given: Any) -> None:
    common = {**COMMON, "model": given.model, "data.path": given.data}
    common["evaluation.texts"] = f"public={given.public}"
    records = [
        len(Path(given.data.format(client=client)).read_text().splitlines()) for client in range(2)
    ]
    private = {"privacy.epsilon": EPSILON, "privacy.noise": "secure"}
    rate = {"privacy.sampling-rate": round(2 * BATCH / sum(records), 4)}
    steps = STEPS * 2 * BATCH
    cells = {
        "FedPETuning": ({**common, **TUNING, "task.test-path": given.test}, rate, steps, steps),
        "pooled pruning": ({**common, **PRUNING}, {}, 2 * SAMPLES, sum(records)),
    }
    print("| | plain, ms per sequence | private | ratio |\n|---|---|---|---|")
    for name, (settings, more, plain, counted) in cells.items():
        # A private run counts all records.
        with_noise = {key: settings[key] for key in settings if key != "data.num-samples"}
        with_noise |= private | more
        pairs = [
            (_seconds(settings) / plain, _seconds(with_noise) / counted) for _ in range(given.turns)
        ]
        one, other = (1000 * median(values) for values in zip(*pairs, strict=True))
        print(f"| {name} | {one:.1f} | {other:.1f} | {other / one:.2f} |", flush=True)
    print(json.dumps({"records": records, "epsilon": EPSILON}))


def main() -> int:
    """Measure, and return the exit code."""
    parser = new_parser("benchmarks.speed.private_steps", __doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True, help="records, {client} for the client's number")
    parser.add_argument("--test", required=True, help="test items of Dolly")
    parser.add_argument("--public", required=True, help="text for the evaluation")
    parser.add_argument("--turns", type=int, default=3)
    given = parser.parse_args()
    return exit_status(lambda: _work(given))


if __name__ == "__main__":
    sys.exit(main())
