"""Time of every method's training messages on the CPU and on a CUDA device, as a Markdown table.

    python -m benchmarks.speed.devices [--shape 0.1b] [--methods fedprllm ...] [--devices cpu cuda]

Runs of two clients on a LLaMA with random weights (``random_llama.py``), with the settings of
``benchmarks.plan`` and texts of this project's pages; each run has a process of its own, in which
messages are function calls. Seconds are the wall time of the second client's training messages, as
the first one's also load libraries and compile kernels; what the first took besides is a column of
its own. Peaks are those of torch's allocator on the device. Files are the tensors of the result:
how many have equal bytes on both devices.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context, RecordDict

from benchmarks.models.random_llama import SHAPES, save_model
from benchmarks.plan.__main__ import ROOT, settings_of
from benchmarks.plan.separate_clients import state_in
from espalier.settings.registry import METHODS


def main() -> None:
    """Run the methods and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="0.1b")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--devices", nargs="+", choices=["cpu", "cuda"], default=["cpu", "cuda"])
    parser.add_argument("--model", help="directory of a model, in place of a random one")
    given = parser.parse_args()
    if "cuda" in given.devices and not torch.cuda.is_available():
        raise SystemExit("--devices cuda: this machine has no CUDA device that torch can use")
    print("| method | device | training | first client, besides | device's peak | equal files |")
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        model = given.model or str(Path(folder) / "model")
        if not given.model:
            save_model(Path(model), SHAPES[given.shape])
        for method in given.methods:
            _rows_of(method, given.devices, model)


def _rows_of(method: str, devices: list[str], model: str) -> None:
    found = [_in_a_fresh_process(method, device, model) for device in devices]
    for device, own in zip(devices, found, strict=True):
        if "error" in own:
            print(f"| {method} | {device} | {own['error']} | | | |", flush=True)
            continue
        reference = found[0].get("files", {})
        equal = sum(reference.get(name) == digest for name, digest in own["files"].items())
        first, second = own["seconds"]
        print(
            f"| {method} | {device} | {second:.2f} s | {first - second:.2f} s |"
            f" {own['peak'] / 1e6:,.0f} MB | {equal} of {len(own['files'])} |",
            flush=True,
        )


def _in_a_fresh_process(method: str, device: str, model: str) -> dict[str, Any]:
    command = [sys.executable, "-c", "from benchmarks.speed.devices import measure; measure()"]
    done = subprocess.run(
        [*command, method, device, model], capture_output=True, text=True, cwd=ROOT
    )
    if done.returncode:
        print(done.stderr[-4000:], file=sys.stderr)
        return {"error": f"ended with {done.returncode}"}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure() -> None:
    """Do one run in this process, and print its figures as the last line."""
    from client_app.app import app
    from espalier.messages.records import read
    from server_app.app import run_method
    from tests.in_process import InProcessGrid

    method, device, model = sys.argv[1:]
    seconds = [0.0, 0.0]

    def timed(message: Any, context: Context) -> Any:
        started = time.perf_counter()
        reply = app(message, context)
        if read(message.content).header.kind == "train":
            seconds[context.node_config["partition-id"]] += time.perf_counter() - started
        return reply

    with tempfile.TemporaryDirectory() as folder:
        config = settings_of(method, model, Path(folder))
        config |= {
            "out-dir": str(Path(folder) / "runs"),
            "device": device,
            "threads": os.cpu_count() or 1,
        }
        nodes = [{"partition-id": client, "num-partitions": 2} for client in range(2)]
        with state_in(Path(folder) / "state"):
            grid = InProcessGrid(timed, nodes, config)
            run = run_method(grid, Context(1, 0, {}, RecordDict(), config))
        files = {
            str(file.relative_to(run)): hashlib.sha256(file.read_bytes()).hexdigest()
            for file in sorted(run.rglob("*.safetensors"))
        }
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    print(json.dumps({"seconds": seconds, "peak": peak, "files": files}))


if __name__ == "__main__":
    main()
