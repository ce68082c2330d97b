"""Short run that can be interrupted repeatedly: how it is started, and what remains."""

import json
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from tests.processes.deployment import espalier_command, eventually

ROOT = Path(__file__).parent.parent.parent
SITES = ("hospital-a", "hospital-b")
SETTINGS = (
    "two-sites",
    "pruning.strategy=iterative",
    "evaluation.max-samples=4",
    "data.num-samples=2",
    "--app",
    str(ROOT),
)


def results_of(folder: Path) -> Path:
    (run,) = (folder / "runs").iterdir()
    return run


def repeated(run: Path) -> dict[str, bytes]:
    """Return the files that must not depend on interruptions."""
    files = [
        run / "masks.safetensors",
        *run.glob("model/*"),
        *(file for file in run.glob("checkpoint/**/*") if file.is_file()),
    ]
    return {str(file.relative_to(run)): file.read_bytes() for file in files}


def without_traffic(run: Path) -> dict[str, bytes]:
    """Return the files that must not depend on repeated messages, which checkpoints count."""
    return {
        name: data
        for name, data in repeated(run).items()
        if not name.endswith(("state.json", "previous.json"))
    }


def summary(run: Path) -> dict[str, object]:
    document = json.loads((run / "summary.json").read_text())
    for entry in (document, *document["clients"]):
        entry.pop("seconds")
    return document


def finished_rounds(folder: Path) -> int:
    """Return the round in the checkpoint of the folder's only run."""
    states = list(folder.glob("runs/*/checkpoint/state.json"))
    return json.loads(states[0].read_text())["round"] if states else 0


def words_of(processes: Iterable[psutil.Process]) -> str:
    """Return all words of the processes' command lines; ended processes have none."""
    found: list[str] = []
    for process in processes:
        with suppress(psutil.Error):
            found += process.cmdline()
    return " ".join(found)


def first_round(folder: Path, command: subprocess.Popen[str]) -> None:
    """Wait until a round is finished; fail if the command ends first."""
    eventually(lambda: finished_rounds(folder) >= 1 or command.poll() is not None)
    assert finished_rounds(folder) >= 1, (folder / "command.log").read_text()


@contextmanager
def started(folder: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Start the ``espalier`` command, continue, and stop it at the end."""
    command, env = espalier_command(folder, *arguments)
    with open(folder / "command.log", "w") as log:
        running = subprocess.Popen(
            command, cwd=folder, env=env, stdout=log, stderr=subprocess.STDOUT, text=True
        )
        try:
            yield running
        finally:
            running.terminate()
            running.wait()
