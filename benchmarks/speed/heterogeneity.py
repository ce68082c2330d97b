"""Cost of layer sampling for weak clients: layers, bytes, seconds and peak memory.

    python -m benchmarks.speed.heterogeneity [--shape 0.1b] [--samples 8] [--tokens 128]

FedSpaLLM runs on a LLaMA of random weights, with clients of capability 1, 2 and 4. A SuperLink and
a SuperNode per client run on this machine, so every message is processed in a new process. The peak
resident memory is the kernel's figure.
"""

import argparse
import json
import tempfile
import threading
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

from benchmarks.models.random_llama import SHAPES, save_model
from tests.processes.deployment import Federation, espalier, federation

ROOT = Path(__file__).parents[2]
CAPABILITIES = {"site-a": 1.0, "site-b": 2.0, "site-c": 4.0}
LOOK_SECONDS = 0.1


class Watch(threading.Thread):
    """Thread that polls each site's ClientApp processes until ``finish`` is called."""

    def __init__(self, watched: Federation) -> None:
        super().__init__(daemon=True)
        self.peaks: dict[str, int] = defaultdict(int)
        """Peak resident memory of any ClientApp of a site, in bytes."""
        self._watched = watched
        self._ended = threading.Event()

    def run(self) -> None:
        """Poll until the end."""
        while not self._ended.wait(LOOK_SECONDS):
            for site in CAPABILITIES:
                for pid in self._watched.processes("flwr-clientapp", site):
                    # The process may have ended since it was listed.
                    with suppress(OSError, IndexError):
                        status = Path(f"/proc/{pid}/status").read_text()
                        self.peaks[site] = max(
                            self.peaks[site], int(status.split("VmHWM:")[1].split()[0]) * 1024
                        )

    def finish(self) -> None:
        """Stop polling."""
        self._ended.set()
        self.join()


def main() -> None:
    """Run the measurement and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="0.1b", choices=sorted(SHAPES))
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        save_model(folder / "model", SHAPES[given.shape])
        words = [
            "fedspallm", f"model={folder / 'model'}", f"num-clients={len(CAPABILITIES)}",
            f"data.num-samples={given.num_samples}", f"data.sequence-length={given.tokens}",
            "evaluation.max-samples=2", "evaluation.sequence-length=64", "threads=1",
            "evaluation.local-baseline=false",
        ]  # fmt: skip
        own = f'model-path="{folder / "model"}"'
        more = {site: f"{own} capability={value}" for site, value in CAPABILITIES.items()}
        with federation(folder, list(CAPABILITIES), more) as started:
            watch = Watch(started)
            watch.start()
            done = espalier(
                folder,
                "run",
                *words,
                "--app",
                str(ROOT),
                "--superlink",
                started.control,
                seconds=3600,
            )
            watch.finish()
        if done.returncode:
            raise SystemExit(done.stdout + done.stderr)
        (run,) = (folder / "runs").iterdir()
        clients = json.loads((run / "summary.json").read_text())["clients"]
    shape = SHAPES[given.shape]
    print(
        f"{shape.blocks} layers, {given.num_samples} samples of {given.tokens} tokens,"
        " sparsity 50%, bf16\n"
    )
    print(
        "| capability | layers | megabytes up | seconds of work | peak memory of the ClientApp"
        " |\n|---|---|---|---|---|"
    )
    for client in clients:
        site = client["site"]
        layers = len(client["metrics"]["layers"])
        print(
            f"| {CAPABILITIES[site]:.0f} | {layers} | {client['bytes_up'] / 1e6:.1f} |"
            f" {client['seconds']:.1f} | {watch.peaks[site] / 1e6:.0f} MB |"
        )


if __name__ == "__main__":
    main()
