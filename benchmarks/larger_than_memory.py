"""How much memory does one client need to prune a model that does not fit? And where does its time go?

    python -m benchmarks.larger_than_memory [--model DIRECTORY] [--windows 8] [--tokens 256] [--activations disk]

Without ``--model`` a LLaMA of 1.1 billion random weights is made first (bf16, sharded, 2.2 GB in a temporary directory).
The client's local job runs in a fresh process, which reads with ``pread`` and maps no file. Its peak memory is compared with
what it must hold: the interpreter with its libraries, the calibration activations, the embeddings and head, and blocks.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.random_llama import SHAPES, VOCABULARY, save_model

HIDDEN = SHAPES["1.1b"].hidden


class Stopwatch:
    """Adds up the time of functions by name; a function within another is counted once, under its own name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._running: list[str] = []
        self._since = time.perf_counter()

    def watch(self, owner: Any, function: str, name: str) -> None:
        """Count an owner's function under a name from now on."""
        work = getattr(owner, function)

        def timed(*arguments: Any, **named: Any) -> Any:
            self._switch(name)
            try:
                return work(*arguments, **named)
            finally:
                self._switch(None)

        setattr(owner, function, timed)

    def _switch(self, name: str | None) -> None:
        now = time.perf_counter()
        current = self._running[-1] if self._running else "other"
        self.seconds[current] = self.seconds.get(current, 0.0) + now - self._since
        self._since = now
        if name is None:
            self._running.pop()
        else:
            self._running.append(name)


def peak() -> int:
    """Highest resident memory of this process so far, bytes; ``getrusage`` would count the process that started it, too."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def prune(given: argparse.Namespace) -> dict[str, Any]:
    """One client's one-shot masks; what it took."""
    from espalier.modeling.block_stream import Activations, BlockStream
    from espalier.modeling.calibration import prune_by_block
    from espalier.modeling.computing import set_up
    from espalier.modeling.opened import open_model
    from espalier.settings.run import parse
    from espalier.storage.blobs import BlobStore
    from espalier.wire.masks import pack_masks
    from pruning_kernels import local
    from pruning_kernels.local import LocalPruning

    keys = ("model", "threads", "device", "dtype", "activations")
    settings = parse({key: getattr(given, key) for key in keys})
    computing, model = set_up(settings, Path(given.folder)), open_model(given.model)
    small = torch.zeros(1024, 1024)
    LocalPruning("wanda", 0.5, "row").prune_mask(small, torch.ones(1024))  # compile the kernel before memory is counted
    model.new_skeleton()
    before = peak()
    watch = Stopwatch()
    watch.watch(BlockStream, "_load", "read")
    watch.watch(Activations, "through", "forward")
    watch.watch(local, "select_lowest", "score, select")
    generator = torch.Generator().manual_seed(0)
    windows = torch.randint(0, VOCABULARY, (given.windows, given.tokens), generator=generator)
    started = time.perf_counter()
    store = BlobStore(Path(given.folder))
    watch.watch(store, "put", "write masks")
    choose = LocalPruning("wanda", 0.5, "row").prune_mask
    for _, masks in prune_by_block(BlockStream(model, computing), windows, choose):
        store.put(pack_masks(masks))
    seconds = time.perf_counter() - started
    watch._switch("end")
    size = {"float32": 4, "bfloat16": 2, "float16": 2}[given.dtype]
    block = size * (model.plan.num_weights // len(model.plan.blocks))
    return {
        "seconds": seconds,
        "split": dict(sorted(watch.seconds.items())),
        "interpreter": before,
        "peak": peak(),
        "activations": size * given.windows * given.tokens * HIDDEN,
        "in_memory": given.activations == "memory",
        "embeddings": 2 * size * VOCABULARY * HIDDEN,
        "block": block,
        "blocks": len(model.plan.blocks),
        "on_disk": sum(file.stat().st_size for file in Path(given.model).glob("*.safetensors")),
        "gpu_peak": torch.cuda.max_memory_allocated() if computing.device.type == "cuda" else 0,
    }


def report(found: dict[str, Any]) -> None:
    """Print what was measured."""
    megabytes = {name: found[name] / 1e6 for name in ("interpreter", "peak", "activations", "embeddings", "block", "on_disk")}
    held = megabytes["activations"] if found["in_memory"] else 0
    above = megabytes["peak"] - megabytes["interpreter"] - held
    allowed = 2 * megabytes["block"] + megabytes["embeddings"]
    print(f"model on disk {megabytes['on_disk']:.0f} MB, {found['blocks']} blocks of {megabytes['block']:.0f} MB as computed")
    print(f"peak {megabytes['peak']:.0f} MB, of it interpreter {megabytes['interpreter']:.0f} MB")
    print(f"activations {megabytes['activations']:.0f} MB, in memory {held:.0f} MB")
    print(f"above interpreter and activations in memory: {above:.0f} MB,")
    print(f"two blocks and the embeddings: {allowed:.0f} MB, ratio {above / allowed:.2f}")
    split = ", ".join(f"{name} {1000 * value / found['blocks']:.0f} ms" for name, value in found["split"].items())
    print(f"{found['seconds']:.1f} s; per block: {split}")
    if found["gpu_peak"]:
        print(f"peak GPU memory {found['gpu_peak'] / 1e6:.0f} MB")


def main() -> None:
    """Make a model if none is given, measure in a fresh process, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="")
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--activations", default="memory", choices=("memory", "disk"))
    parser.add_argument("--folder", default="", help="where masks and spilled activations are written; default: temporary")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        print(json.dumps(prune(given)))
        return
    with tempfile.TemporaryDirectory() as folder:
        if not given.model:
            save_model(Path(folder), SHAPES["1.1b"])
            given.model = folder
        given.folder = given.folder or folder
        options = [f"--{name}={value}" for name, value in vars(given).items() if name != "measure"]
        command = [sys.executable, "-m", "benchmarks.larger_than_memory", *options, "--measure"]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    report(json.loads(done.stdout.splitlines()[-1]))


if __name__ == "__main__":
    main()
