"""Masks of a model through real processes: peak memory of each process, and transfer speed.

    python -m benchmarks.speed.wire [--shape 7b|2.1b|1.1b|0.1b] [--clients 2] [--part-mb 256]
    [--warm]

A LLaMA of random weights is made on disk (``7b``: 13.5 GB, and the same again for the pruned
model). A SuperLink and a SuperNode per client run on this machine. Every client prunes the whole
model with a little text, and its packed masks (809 MB for ``7b``) are sent in parts. All processes
are polled several times a second for their peak resident memory (the kernel's figure), and the
inbox for the bytes that have arrived. While parts arrive, their processor time is counted, too.
With ``--warm`` the nodes are ``espalier node``, which starts no process per message.

The plain reference in the same run sends the same bytes over one gRPC stream into files, with the
same hash checks (``plain_stream``). The masks that the server decided must equal a plain count, in
one process, of the clients' masks from their private state (``plain_vote``).
"""

import argparse
import json
import os
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.numpy import load_file

from benchmarks.models.random_llama import SHAPES, save_model
from benchmarks.speed.plain_stream import receive
from benchmarks.speed.plain_vote import plain_vote, unpacked
from espalier.hf.opening.opened_model import OpenedModel
from espalier.messages.blobs.masks import mask_name
from tests.processes.deployment import Federation, espalier, federation

ROOT = Path(__file__).parents[2]
PROGRAMS = {
    "ServerApp": "flwr-serverapp",
    "SuperLink": "flower-superlink",
    "SuperNode": "espalier.flower.supernode",
    "ClientApp": "flwr-clientapp",
    "warm worker": "client_app.node.warm_worker",
}
TICKS = os.sysconf("SC_CLK_TCK")
LOOK_SECONDS = 0.2
HOURS = 3600
PART_MB = {"0.1b": 3, "1.1b": 32, "2.1b": 64, "7b": 256}
"""Part size of each shape for about four parts per client, if ``--part-mb`` is not given."""
SPARSITY = 0.5


class Watch(threading.Thread):
    """Thread that polls a federation's processes and the inbox until ``finish`` is called."""

    def __init__(self, watched: Federation, runs: Path) -> None:
        super().__init__(daemon=True)
        self.peaks: dict[str, int] = defaultdict(int)
        """Peak resident memory of any process of a kind, in bytes."""
        self.arrived: list[tuple[float, int]] = []
        """(seconds, bytes in the inbox), whenever the inbox has grown."""
        self.worked: dict[str, dict[int, float]] = {kind: {} for kind in PROGRAMS}
        """Processor seconds of each process so far, by kind and process id."""
        self.worked_before: dict[str, float] = {}
        """Processor seconds by kind when the first part had arrived."""
        self.worked_at_last: dict[str, float] = {}
        """Processor seconds by kind when the last part had arrived."""
        self._watched = watched
        self._runs = runs
        self._ended = threading.Event()

    def run(self) -> None:
        """Poll until the end."""
        while not self._ended.wait(LOOK_SECONDS):
            for kind, program in PROGRAMS.items():
                for pid in self._watched.processes(program):
                    # The process may have ended since it was listed.
                    with suppress(OSError, IndexError):
                        status = Path(f"/proc/{pid}/status").read_text()
                        self.peaks[kind] = max(
                            self.peaks[kind], int(status.split("VmHWM:")[1].split()[0]) * 1024
                        )
                        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
                        self.worked[kind][pid] = (int(fields[11]) + int(fields[12])) / TICKS
            size = 0
            for file in self._runs.glob("*/inbox/*/block-*"):
                with suppress(OSError):
                    size += file.stat().st_size
            if size > (self.arrived[-1][1] if self.arrived else 0):
                self.arrived.append((time.monotonic(), size))
                self.worked_at_last = self.seconds()
                self.worked_before = self.worked_before or self.worked_at_last

    def seconds(self) -> dict[str, float]:
        """Return the processor seconds of all processes so far, by kind."""
        return {kind: sum(own.values()) for kind, own in self.worked.items()}

    def finish(self) -> None:
        """Stop polling."""
        self._ended.set()
        self.join()


@dataclass
class Measured:
    """Measurements of one federated run and of the plain reference."""

    watch: Watch
    events: list[dict[str, Any]]
    summary: dict[str, Any]
    plain_seconds: float
    """Seconds of the plain stream for all clients' bytes."""
    plain_work: float
    """Processor seconds of its two processes."""
    compared: int
    """Number of matrices whose masks equal the plain count."""


def measure(folder: Path, given: argparse.Namespace) -> Measured:
    """Run the federation, then the plain stream and the plain count.

    Raises
    ------
    SystemExit
        The run failed, or a mask differs from the plain count.
    """
    save_model(folder / "model", SHAPES[given.shape])
    sites = [f"site-{number}" for number in range(given.clients)]
    words = [
        f"model={folder / 'model'}", f"num-clients={given.clients}",
        f"part-bytes={given.part_mb * 1024 * 1024}", "data.num-samples=1",
        "data.sequence-length=64", "evaluation.max-samples=2", "evaluation.sequence-length=64",
        "evaluation.local-baseline=false", f"deadline-seconds={HOURS}",
        f"pruning.sparsity={SPARSITY}",
    ]  # fmt: skip
    with federation(
        folder,
        sites,
        dict.fromkeys(sites, f'model-path="{folder / "model"}"'),
        sites if given.warm else (),
    ) as started:
        watch = Watch(started, folder / "runs")
        watch.start()
        command = ("run", *words, "--app", str(ROOT), "--superlink", started.control)
        done = espalier(folder, *command, seconds=HOURS)
        watch.finish()
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    (run,) = (folder / "runs").iterdir()
    votes = {site: kept_masks(folder / site) for site in sites}
    before = sum(os.times()[:4])
    plain_seconds = receive([blob for blobs in votes.values() for blob in blobs], folder / "plain")
    plain_work = sum(os.times()[:4]) - before
    compared = compare(
        OpenedModel(folder / "model"), list(votes.values()), run / "masks.safetensors"
    )
    events = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return Measured(
        watch,
        events,
        json.loads((run / "summary.json").read_text()),
        plain_seconds,
        plain_work,
        compared,
    )


def kept_masks(state: Path) -> list[Path]:
    """Return the mask blobs in a client's private state, one per block, in order of blocks."""
    (report,) = state.glob("*/*/r001/train.json")
    blobs = json.loads(report.read_text())["report"]["blob_sha256"]
    return [report.parent / f"{blob}.blob" for blob in blobs]


def compare(model: OpenedModel, votes: Sequence[Sequence[Path]], decided: Path) -> int:
    """Compare every bit with a plain count and selection; return the number of matrices.

    Raises
    ------
    SystemExit
        A mask differs.
    """
    compared = 0
    with safe_open(decided, "numpy") as file:
        for block in model.plan.blocks:
            own = [load_file(blobs[block.index]) for blobs in votes]
            for linear in block.linears:
                masks = [unpacked(masks[mask_name(linear.name)], linear.shape) for masks in own]
                weight = model.checkpoint.read(linear.parameter).float().numpy()
                expected = plain_vote(masks, weight, SPARSITY)
                if (unpacked(file.get_tensor(linear.parameter), linear.shape) != expected).any():
                    raise SystemExit(
                        f"{linear.parameter}: the server's mask differs from the plain count"
                    )
                compared += 1
    return compared


def report(given: argparse.Namespace, found: Measured) -> None:
    """Print the measurements."""
    watch = found.watch
    summary = found.summary
    (first_at, first), (last_at, last) = watch.arrived[0], watch.arrived[-1]
    print(
        f"{given.clients} clients, {last / given.clients / 1e6:.0f} MB of masks each, in parts of"
        f" {given.part_mb} MiB"
    )
    print(f"{found.compared} masks of the server equal the plain count of the clients' masks\n")
    ours = (last - first) / (last_at - first_at) / 1e6 if last_at > first_at else float("nan")
    plain = last / found.plain_seconds / 1e6
    print("| way | MB/s | relative to the plain stream |\n|---|---|---|")
    print(
        f"| parts into the ServerApp's inbox, after the first one arrived | {ours:.0f} |"
        f" {ours / plain:.2f} |"
    )
    print(
        f"| one gRPC stream between two processes, into files, hashes checked | {plain:.0f} | 1 |\n"
    )
    print(
        "| process | peak resident memory | processor seconds per GB that arrived |\n|---|---|---|"
    )
    for kind in PROGRAMS:
        if watch.peaks[kind]:
            worked = watch.worked_at_last[kind] - watch.worked_before[kind]
            rate = worked / (last - first) * 1e9 if last > first else float("nan")
            print(f"| {kind} | {watch.peaks[kind] / 1e6:.0f} MB | {rate:.1f} |")
    print(f"| sender and receiver of the plain stream | | {found.plain_work / last * 1e9:.1f} |")
    print("\n| step | seconds |\n|---|---|")
    begun = datetime.fromisoformat(found.events[0]["time"])
    for event in found.events:
        if event["event"] in ("method", "masks", "checkpoint", "exported", "evaluated"):
            at = (datetime.fromisoformat(event["time"]) - begun).total_seconds()
            print(f"| {event['event']} {event.get('column', event.get('client', ''))} | {at:.0f} |")
    print(f"\nachieved sparsity {summary['sparsity']['achieved']}, work of the clients "
          + ", ".join(f"{client['seconds']:.0f} s" for client in summary["clients"]))  # fmt: skip


def main() -> None:
    """Run the measurement and print tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="7b", choices=sorted(SHAPES))
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument(
        "--part-mb", type=int, default=0, help="default: about four parts per client"
    )
    parser.add_argument("--warm", action="store_true", help="use espalier node")
    parser.add_argument(
        "--folder", default=None, help="on a disk with room for the model, its copy and the masks"
    )
    given = parser.parse_args()
    given.part_mb = given.part_mb or PART_MB[given.shape]
    with tempfile.TemporaryDirectory(dir=given.folder) as scratch:
        report(given, measure(Path(scratch), given))


if __name__ == "__main__":
    main()
