"""How near is the plan for Flower's own processes? Runs on a SuperLink and two SuperNodes, and the peaks of these processes.

    python -m benchmarks.plan.deployed [--methods fedprllm sft-p llm-streamline]

The runs are those of ``python -m benchmarks.plan`` on the LLaMA of random weights, with real processes on this machine. Printed
is a Markdown table of planned and measured resident memory.
"""

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.plan.__main__ import ROOT, WIDE, words_of
from benchmarks.random_llama import save_model
from espalier.launch.app_folder import find_app
from espalier.launch.configuration import configuration
from espalier.modeling.opened import open_model
from espalier.settings.run import parse
from server_app.planning.flower import superlink, supernode
from server_app.planning.plan import Plan
from tests.processes.deployment import espalier, federation

MEGA = 1e6
ENOUGH: dict[str, Any] = {"evaluation.max-windows": 8}
"""Predictions of the public text for what sites make alone."""


def measured(method: str, model: str, clients: int, folder: Path) -> Iterator[tuple[str, int, int]]:
    """Name of a process, its planned and its measured peak, bytes.

    Raises
    ------
    SystemExit
        The run failed.
    """
    sites = [f"site-{number}" for number in range(clients)]
    words = words_of(method, model, folder, **ENOUGH, **{"num-clients": clients})
    chosen, _ = configuration(find_app(str(ROOT)), words, on_this_machine=True)
    plan = Plan(parse(chosen), open_model(model), simulation=False)
    largest = plan.traffic.total("most").largest
    data = f'model-path="{model}" data-path="{chosen["data.path"]}" most-model-bytes=4000000000'
    with federation(folder, sites, dict.fromkeys(sites, data), warm=sites) as started:
        done = espalier(folder, "run", *words, "--app", str(ROOT), "--superlink", started.control, seconds=3600)
        if done.returncode:
            raise SystemExit(done.stdout + done.stderr)
        yield "SuperLink", superlink(largest).peak, _peak(started.superlink.pid)
        nodes = [pid for site in sites for pid in started.processes("flower-supernode", site) if pid != started.nodes[site].pid]
        yield "SuperNode", supernode(largest).peak, max(map(_peak, nodes))


def _peak(pid: int) -> int:
    """Highest resident memory of a process so far, bytes."""
    return int(Path(f"/proc/{pid}/status").read_text().split("VmHWM:")[1].split()[0]) * 1024


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=["fedprllm", "sft-p", "llm-streamline"])
    parser.add_argument("--clients", type=int, default=2)
    given = parser.parse_args()
    print("| method | clients | process | planned / measured |\n|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch) / "model"
        model.mkdir()
        save_model(model, WIDE)
        for method in given.methods:
            folder = Path(scratch) / method
            folder.mkdir()
            for name, planned, found in measured(method, str(model), given.clients, folder):
                ratio = planned / found
                print(
                    f"| {method} | {given.clients} | {name} | {planned / MEGA:.0f} / {found / MEGA:.0f} MB ({ratio:.2f}) |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
