"""Accuracy of the estimate for Flower's processes: peak memory of a SuperLink and SuperNodes.

    python -m benchmarks.plan.deployed [--methods fedpetuning fedprllm ...] [--clients 2] [--out
    docs/studies/plan-deployed.csv]

The runs are those of ``python -m benchmarks.plan`` on the LLaMA of random weights, with real
processes on this machine. Estimated and measured resident memory go to the CSV file row by row (an
interrupted study continues there), and then to a Markdown table next to it. ``--again`` updates the
estimates of measured runs.
"""

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.models.random_llama import save_model
from benchmarks.plan.__main__ import COMMON, ROOT, WIDE, words_of
from benchmarks.reporting.rows import Rows
from espalier.flower.programs import SUPERNODE_MODULE
from espalier.hf.opening.opened_model import open_model
from espalier.launch.app import find_app
from espalier.launch.configuration import configuration
from espalier.settings.registry import METHODS
from espalier.settings.run import parse
from server_app.estimate.estimate import Plan
from tests.processes.deployment import espalier, federation

MEGA = 1e6
ENOUGH: dict[str, Any] = {"evaluation.max-samples": 8}
"""Settings with enough predictions of the evaluation text for real sites."""


PROCESSES = ("SuperLink", "SuperNode")
KEYS = ("method", "clients", "process")
FIGURES = ("largest", "planned", "measured")


def plan_of(
    method: str, model: str, clients: int, folder: Path
) -> tuple[list[str], dict[str, Any], Plan]:
    """Return the arguments of a run, its flat configuration and its estimate."""
    words = words_of(method, model, folder, **ENOUGH, **{"num-clients": clients})
    chosen, _ = configuration(find_app(str(ROOT)), words, on_this_machine=True)
    return words, chosen, Plan(parse(chosen), open_model(model), simulation=False)


def planned(plan: Plan) -> dict[str, tuple[int, int]]:
    """Return the largest message and the estimated peak in bytes, by process."""
    largest = plan.traffic.total().largest
    peaks = {"SuperLink": plan.superlink.peak, "SuperNode": plan.supernode.peak}
    return {process: (largest, peak) for process, peak in peaks.items()}


def measured(
    method: str, model: str, clients: int, folder: Path
) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield the name of a process and its figures in bytes.

    Raises
    ------
    SystemExit
        The run failed.
    """
    sites = [f"site-{number}" for number in range(clients)]
    words, chosen, plan = plan_of(method, model, clients, folder)
    data = f'model-path="{model}" data-path="{chosen["data.path"]}" max-model-bytes=4000000000'
    with federation(folder, sites, dict.fromkeys(sites, data), warm=sites) as started:
        done = espalier(
            folder, "run", *words, "--app", str(ROOT), "--superlink", started.control, seconds=3600
        )
        if done.returncode:
            raise SystemExit(done.stdout + done.stderr)
        found = {"SuperLink": _peak(started.superlink.pid)}
        nodes = [
            pid
            for site in sites
            for pid in started.processes(SUPERNODE_MODULE, site)
            if pid != started.nodes[site].pid
        ]
        found["SuperNode"] = max(map(_peak, nodes))
    for process, (largest, peak) in planned(plan).items():
        yield process, {"largest": largest, "planned": peak, "measured": found[process]}


def _peak(pid: int) -> int:
    """Return the peak resident memory of a process in bytes."""
    return int(Path(f"/proc/{pid}/status").read_text().split("VmHWM:")[1].split()[0]) * 1024


def again(rows: Rows, model: str) -> None:
    """Update the estimates of all measured runs, after formulas were changed."""
    for row in rows.rows:
        with tempfile.TemporaryDirectory() as folder:
            largest, peak = planned(
                plan_of(row["method"], model, int(row["clients"]), Path(folder))[2]
            )[row["process"]]
        row |= {"largest": f"{largest:.6g}", "planned": f"{peak:.6g}"}
    lines = [",".join(row[name] for name in KEYS + FIGURES) for row in rows.rows]
    rows.path.write_text("\n".join([",".join(KEYS + FIGURES), *lines, ""]))


HEAD = """# Estimated and measured memory of Flower's processes

Runs of a LLaMA with 211 million random weights on a SuperLink and real nodes; \
`python -m benchmarks.plan.deployed` repeats
them. The values are peaks of resident memory, for SuperNodes the largest. \
The estimate interpolates between these runs, so its
agreement with them says little. \
Peaks depend on which messages are on their way at the same time: in two runs of FedSpaLLM with
an earlier Flower, a SuperNode used 348 and 409 MB.

| method | clients | process | largest message | estimated / measured |
|---|---|---|---|---|"""


def table(rows: Rows) -> str:
    """Return the table in Markdown."""
    lines = [HEAD]
    for row in rows.rows:
        largest, plan, found = (float(row[name]) / MEGA for name in FIGURES)
        cells = (
            row["method"],
            row["clients"],
            row["process"],
            f"{largest:.1f} MB",
            f"{plan:.0f} / {found:.0f} MB ({plan / found:.2f})",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def main() -> None:
    """Measure missing rows, and write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "studies" / "plan-deployed.csv")
    parser.add_argument(
        "--again",
        action="store_true",
        help="measure nothing, and repeat the estimates for what was measured",
    )
    given = parser.parse_args()
    rows = Rows(given.out, KEYS, FIGURES, {"common": COMMON, "enough": ENOUGH})
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch) / "model"
        model.mkdir()
        save_model(model, WIDE)
        if given.again:
            again(rows, str(model))
        for method in () if given.again else given.methods:
            cell = {"method": method, "clients": given.clients}
            if not rows.missing({**cell, "process": process} for process in PROCESSES):
                continue
            folder = Path(scratch) / method
            folder.mkdir()
            figures = dict(measured(method, str(model), given.clients, folder))
            rows.add_all(({**cell, "process": process}, figures[process]) for process in PROCESSES)
    given.out.with_suffix(".md").write_text(table(rows))


if __name__ == "__main__":
    main()
