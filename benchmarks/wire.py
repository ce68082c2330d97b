"""A model's masks through real processes: how much memory does each process need, and how fast do parts travel?

    python -m benchmarks.wire [--shape 7b] [--clients 2] [--part-mb 256]

A LLaMA of random weights is made on disk (``7b``: 13.5 GB, and as much again for the pruned model). A SuperLink and a SuperNode
per client run on this machine; every client prunes the whole model with a little text, and its packed masks (809 MB for
``7b``) travel in parts. All processes are looked at several times a second: the highest resident memory of each
kind, as the kernel counted it, and what has arrived at the server so far.
"""

import argparse
import json
import tempfile
import threading
import time
from collections import defaultdict
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from benchmarks.random_llama import SHAPES, save_model
from tests.processes.deployment import Federation, espalier, federation

ROOT = Path(__file__).parent.parent
PROGRAMS = {
    "ServerApp": "flwr-serverapp",
    "SuperLink": "flower-superlink",
    "SuperNode": "flower-supernode",
    "ClientApp": "flwr-clientapp",
}
LOOK_SECONDS = 0.2
HOURS = 3600


class Watch(threading.Thread):
    """Looks at the processes of a federation, and at the server's inbox, until it is told to stop."""

    def __init__(self, watched: Federation, runs: Path) -> None:
        super().__init__(daemon=True)
        self.peaks: dict[str, int] = defaultdict(int)
        """Highest resident memory of any process of a kind, bytes."""
        self.arrived: list[tuple[float, int]] = []
        """(seconds, bytes in the inbox), whenever there were more."""
        self._watched, self._runs = watched, runs
        self._ended = threading.Event()

    def run(self) -> None:
        """Look, and look again."""
        while not self._ended.wait(LOOK_SECONDS):
            for kind, program in PROGRAMS.items():
                for pid in self._watched.processes(program):
                    with suppress(OSError, IndexError):  # it has ended meanwhile
                        status = Path(f"/proc/{pid}/status").read_text()
                        self.peaks[kind] = max(self.peaks[kind], int(status.split("VmHWM:")[1].split()[0]) * 1024)
            size = 0
            for file in self._runs.glob("*/inbox/*/block-*"):
                with suppress(OSError):
                    size += file.stat().st_size
            if size > (self.arrived[-1][1] if self.arrived else 0):
                self.arrived.append((time.monotonic(), size))

    def finish(self) -> None:
        """Stop looking."""
        self._ended.set()
        self.join()


def measure(folder: Path, given: argparse.Namespace) -> tuple[Watch, list[dict[str, Any]], dict[str, Any]]:
    """One run; what was seen, its events, and its summary."""
    save_model(folder / "model", SHAPES[given.shape])
    words = [
        f"model={folder / 'model'}", f"num-clients={given.clients}", f"part-bytes={given.part_mb * 1024 * 1024}",
        "data.windows=1", "data.window-tokens=64", "evaluation.max-windows=2", "evaluation.window-tokens=64",
        "evaluation.local-only=false", "export-check=streamed", f"deadline-seconds={HOURS}",
    ]  # fmt: skip
    with federation(folder, [f"site-{number}" for number in range(given.clients)]) as started:
        watch = Watch(started, folder / "runs")
        watch.start()
        command = ("run", *words, "--app", str(ROOT), "--superlink", started.control)
        done = espalier(folder, *command, seconds=HOURS)
        watch.finish()
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    (run,) = (folder / "runs").iterdir()
    events = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return watch, events, json.loads((run / "summary.json").read_text())


def report(given: argparse.Namespace, watch: Watch, events: list[dict[str, Any]], summary: dict[str, Any]) -> None:
    """Print what was measured."""
    (first_at, first), (last_at, last) = watch.arrived[0], watch.arrived[-1]
    print(f"{given.clients} clients, {last / given.clients / 1e6:.0f} MB of masks each, in parts of {given.part_mb} MiB")
    later = (last - first) / (last_at - first_at) / 1e6 if last_at > first_at else float("nan")
    print(f"after the first part arrived: {later:.0f} MB/s into the ServerApp's inbox\n")
    print("| process | peak resident memory |\n|---|---|")
    for kind in PROGRAMS:
        print(f"| {kind} | {watch.peaks[kind] / 1e6:.0f} MB |")
    print("\n| step | seconds |\n|---|---|")
    begun = datetime.fromisoformat(events[0]["time"])
    for event in events:
        if event["event"] in ("method", "masks", "checkpoint", "exported", "evaluated"):
            at = (datetime.fromisoformat(event["time"]) - begun).total_seconds()
            print(f"| {event['event']} {event.get('column', event.get('rank', ''))} | {at:.0f} |")
    print(f"\nachieved sparsity {summary['sparsity']['achieved']}, work of the clients "
          + ", ".join(f"{client['seconds']:.0f} s" for client in summary["clients"]))  # fmt: skip


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="7b", choices=sorted(SHAPES))
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--part-mb", type=int, default=256)
    parser.add_argument("--folder", default=None, help="on a disk with room for the model, its copy and the masks")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as scratch:
        report(given, *measure(Path(scratch), given))


if __name__ == "__main__":
    main()
