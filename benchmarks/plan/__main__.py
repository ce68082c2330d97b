"""Accuracy of `espalier plan`: an estimate and a run of every method are compared.

    python -m benchmarks.plan [--model DIRECTORY] [--name NAME] [--methods fedprllm fedsoda ...]
    [--out docs/studies/plan.csv]

Without ``--model`` the runs use the demo model, and a LLaMA of 211 million random weights (bf16,
0.4 GB in a temporary directory), so that memory is not only that of libraries. Estimate and run
have separate processes, as have the run's server and each client; peaks are the kernel's figures
(``separate_clients.py``). Texts are the pages of this project. Results go to the CSV file row by
row (an interrupted study continues there), and finally to a Markdown table next to it.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.models.random_llama import Shape, save_model
from benchmarks.reporting.rows import Rows
from espalier.errors import InputError
from espalier.launch.app import find_app
from espalier.launch.configuration import configuration
from espalier.settings.registry import METHODS

ROOT = Path(__file__).parents[2]
WIDE = Shape(1536, 4096, 4, 12, 12)
WIDE_NAME = "random-211m"
"""Name of a model whose tensors are large enough to be returned to the system when freed.

The limit is ``computing.LARGE_BYTES``.
"""
KEYS = ("model", "method")
FIGURES = (
    "down_planned", "down_measured", "up_planned", "up_measured", "client_planned",
    "client_measured", "server_planned", "server_measured", "client_libraries", "server_libraries",
    "disk_planned", "disk_measured", "seconds_planned", "seconds_measured",
)  # fmt: skip
TOKENS = 128
COMMON = {
    "num-clients": 2, "threads": 1, "evaluation.max-samples": 4,
    "evaluation.sequence-length": TOKENS, "data.sequence-length": TOKENS, "data.source": "files",
    "evaluation.centralized": "off",
}  # fmt: skip
PRUNING = {"data.num-samples": 4}
TUNING = {"federation.rounds": 2, "training.steps": 2, "training.batch-size": 2}
OWN: Mapping[str, Mapping[str, Any]] = {
    "fedspallm": {"federation.rounds": 2, "fedspallm.sampled-layers": 0.75},
    "fedsoda": {
        "public.samples": 4, "fedsoda.pre-align-steps": 2,
        "fedsoda.realign-every": 0, "fedsoda.group-layers": 1, "fedsoda.groups": 1,
        "fedsoda.adapter-layers": 1,
    },
    "llm-streamline": {"federation.rounds": 2, "llm-streamline.steps": 2},
    "fedspine": {"fedspine.allocation": "fixed", "lora.targets": "all"},
}  # fmt: skip
"""Settings of small runs, by method."""


def settings_of(method: str, model: str, folder: Path) -> dict[str, Any]:
    """Return the flat configuration of a method's run."""
    return configuration(
        find_app(str(ROOT)), words_of(method, model, folder), on_this_machine=True
    )[0]


def words_of(method: str, model: str, folder: Path, **changes: Any) -> list[str]:
    """Return the arguments of ``espalier run`` for a method, with some changes.

    The texts are written to ``folder``.
    """
    chosen: dict[str, Any] = {
        "method": method,
        "model": model,
        **COMMON,
        **(TUNING if METHODS[method].tunes else PRUNING),
    }
    chosen |= {**OWN.get(method, {}), **changes}
    chosen |= {
        "data.path": _text(folder, "how-to"),
        "evaluation.texts": f"public={_text(folder, 'methods')}",
    }
    if method == "fedsoda":
        chosen["public.text"] = _text(folder, "studies")
    return [
        f"{key}={json.dumps(value) if isinstance(value, bool) else value}"
        for key, value in chosen.items()
    ]


def _text(folder: Path, topic: str) -> str:
    """Write the pages of a folder of docs/ to one file and return its path."""
    pages = sorted((ROOT / "docs" / topic).rglob("*.md"))
    path = folder / f"{topic}.txt"
    path.write_text("\n\n".join(page.read_text() for page in pages))
    return str(path)


def measured(config: Mapping[str, Any], folder: Path) -> dict[str, float]:
    """Estimate and run, and return the figures of both."""
    given = {**config, "out-dir": str(folder / "runs")}
    plan = planned(given)
    found = _in_a_fresh_process("benchmarks.plan.measure", given, str(folder))
    sums = {way: sum(own[way] for own in found["bytes"].values()) for way in ("down", "up")}
    clients = found["clients"]
    server = found["server"]
    return plan | {
        "down_measured": sums["down"],
        "up_measured": sums["up"],
        "client_measured": max(max(own["peaks"].values()) for own in clients),
        "server_measured": max(server["peaks"].values()),
        "disk_measured": found["disk"],
        "seconds_measured": max(own["seconds"].get("train", 0.0) for own in clients),
    }


def planned(config: Mapping[str, Any]) -> dict[str, float]:
    """Return the figures of the estimate."""
    return _in_a_fresh_process("benchmarks.plan.prediction", config)


def again(rows: Rows, models: Mapping[str, str]) -> None:
    """Update the estimates of all measured runs, after formulas were changed.

    Estimated seconds stay: they follow from a speed that was measured just before the run.
    """
    for row in rows.rows:
        with tempfile.TemporaryDirectory() as folder:
            config = settings_of(row["method"], models[row["model"]], Path(folder))
            found = {name: f"{value:.6g}" for name, value in planned(config).items()}
        row |= {name: value for name, value in found.items() if name != "seconds_planned"}
    lines = [",".join(row[name] for name in KEYS + FIGURES) for row in rows.rows]
    rows.path.write_text("\n".join([",".join(KEYS + FIGURES), *lines, ""]))


def _in_a_fresh_process(module: str, config: Mapping[str, Any], *arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(
        command, input=json.dumps(config), stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    if done.returncode:
        raise InputError(f"{module} ended with {done.returncode}; see above\n{done.stdout[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@contextmanager
def _models(given: argparse.Namespace) -> Iterator[dict[str, str]]:
    if given.model:
        yield {given.name or Path(given.model).name: given.model}
        return
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder), WIDE)
        yield {"demo": "demo", WIDE_NAME: folder}


def table(rows: list[dict[str, str]]) -> list[str]:
    """Return the table in Markdown."""

    def cell(row: Mapping[str, str], what: str, scale: float, unit: str, digits: int = 0) -> str:
        planned, found = (float(row[f"{what}_{how}"]) for how in ("planned", "measured"))
        ratio = f"{planned / found:.2f}" if found else "-"
        return f"{planned / scale:,.{digits}f} / {found / scale:,.{digits}f} {unit} ({ratio})"

    lines = [
        (
            "| model | method | down | up | client's peak | server's peak | run directory |"
            " training of a client |"
        ),
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = [
            cell(row, "down", 1e3, "kB"), cell(row, "up", 1e3, "kB"),
            cell(row, "client", 1e6, "MB"), cell(row, "server", 1e6, "MB"),
            cell(row, "disk", 1e6, "MB", 1), cell(row, "seconds", 1, "s", 1),
        ]  # fmt: skip
        lines.append(f"| {row['model']} | {row['method']} | {' | '.join(cells)} |")
    return lines


HEAD = """# Estimated and measured costs

Estimated / measured (ratio) of small runs with two clients; `python -m benchmarks.plan` repeats \
them. Bytes are totals of all
clients. Peaks are resident memory of a separate process, including libraries. \
The run directory has its size after the run.
Seconds are processor time of one client's training messages, \
estimated from the speed of matrix products that was measured on
the same machine just before.
"""


def main() -> None:
    """Measure missing rows, and write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="a model's directory, in place of the two")
    parser.add_argument("--name", help="how the table calls it")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "studies" / "plan.csv")
    parser.add_argument(
        "--again",
        action="store_true",
        help="measure nothing, and repeat the estimates for what was measured",
    )
    given = parser.parse_args()
    conditions = {
        "common": COMMON,
        "pruning": PRUNING,
        "tuning": TUNING,
        "own": {key: dict(own) for key, own in OWN.items()},
    }
    rows = Rows(given.out, KEYS, FIGURES, conditions)
    with _models(given) as models:
        if given.again:
            again(rows, models)
        cells = ({"model": name, "method": method} for name in models for method in given.methods)
        for cell in () if given.again else rows.missing(cells):
            with tempfile.TemporaryDirectory() as folder:
                config = settings_of(cell["method"], models[cell["model"]], Path(folder))
                rows.add(cell, **measured(config, Path(folder)))
            print(*table(rows.rows)[-1:], flush=True)
    given.out.with_suffix(".md").write_text("\n".join([HEAD, *table(rows.rows), ""]))


if __name__ == "__main__":
    main()
