"""Runs that were interrupted, to be resumed."""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.bench import LOCAL_ONLY, Bench, results

METHODS: dict[str, dict[str, Any]] = {
    "fedprllm": {"pruning.strategy": "iterative"},
    "fedspallm": {"federation.rounds": 2, "fedspallm.schedule": "linear"},
    "pooled-pruning": {"pruning.strategy": "iterative"},
    "fedpetuning": {
        "federation.rounds": 2,
        "federation.wire-dtype": "bfloat16",
        "training.steps": 2,
        "lora.rank": 2,
    },
    "hetlora": {
        "federation.rounds": 2,
        "lora.ranks": "1,2",
        "training.steps": 2,
        "lora.rank": 2,
    },
}
"""Settings of methods with two rounds each."""


@dataclass(repr=False)
class Interrupted:
    """Run of two rounds that was killed before evaluation, with its expected results."""

    bench: Bench
    run: Path
    state: Path
    expected: dict[str, bytes]

    def again(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """Copy the run directory, with the clients' private state as it was then."""
        run = Path(shutil.copytree(self.run, folder / "runs" / self.run.name))
        monkeypatch.setenv("ESPALIER_STATE_DIR", str(shutil.copytree(self.state, folder / "state")))
        return run

    def resume(self, run: Path) -> dict[str, bytes]:
        self.bench.run(self.bench.grid(), resume_from=str(run))
        return results(run)


def interrupted(folder: Path, method: str) -> Interrupted:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("ESPALIER_STATE_DIR", str(folder / "state"))
        bench = Bench(folder, method, METHODS[method] | LOCAL_ONLY, num_clients=2)
        whole = bench.run()
        run = bench.killed(lambda header: header.kind == "evaluate")
        return Interrupted(bench, run, folder / "state", results(whole))


def remains(run: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(run)): file.read_bytes()
        for file in sorted(run.rglob("*"))
        if file.is_file()
    }
