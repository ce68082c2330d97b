"""Small federation in this process: a tiny model, private texts and runs of the real ServerApp."""

import json
import random
import tomllib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flwr.app import Context, Message, RecordDict

import client_app.app
import server_app.app
from espalier.launch.configuration import flatten
from espalier.messages.message import Header
from espalier.messages.records import read
from espalier.results.finished_run import open_run
from espalier.settings.keys import default_values, unread
from tests.in_process import FakeTime, InProcessGrid
from tests.tiny_model import WORDS, save_tiny_llama

ROOT = Path(__file__).parent.parent
# Benches start many runs, and nobody reads their plans.
server_app.app.tell_plan = lambda *_, **__: None
server_app.app.tell_time_of_sites = lambda *_: None
DEFAULTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]


LOCAL_ONLY = {"evaluation.local-baseline": True}
EVALUATED = LOCAL_ONLY | {"evaluation.own-text": True, "evaluation.centralized": "auto"}
"""Settings of all comparisons that a run can make; without them a run takes a third of the time."""


class Killed(SystemExit):
    """Simulated end of the ServerApp's process."""


@dataclass(frozen=True)
class Home:
    """Tiny model and evaluation text that benches may share.

    Runs over equal paths have equal settings, and therefore equal bytes.
    """

    model: Path
    public: Path


def home(folder: Path) -> Home:
    """Create the model and the evaluation text in ``folder``."""
    model = save_tiny_llama(folder / "base")
    (folder / "public.txt").write_text("\n\n".join(private_text(99).split("\n\n")[:15]))
    return Home(model, folder / "public.txt")


@dataclass
class Bench:
    """Federation of ``num_clients`` sites with one private text each.

    Every run gets a fresh grid over the same sites. A run evaluates the dense and the federated
    model on two sequences of the evaluation text; ``EVALUATED`` adds the other comparisons.
    """

    folder: Path
    method: str
    settings: dict[str, Any]
    num_clients: int = 4
    time: FakeTime = field(default_factory=FakeTime)
    home: Home | None = None
    """Shared model and evaluation text; None creates them in ``folder``."""

    def __post_init__(self) -> None:
        shared = self.home or home(self.folder)
        self.model = shared.model
        self.public = shared.public
        for client in range(self.num_clients):
            (self.folder / f"text-{client}.txt").write_text(private_text(client))
        self._runs = 0

    def config(self, **changes: Any) -> dict[str, Any]:
        """Return the flat run configuration.

        In the names of ``changes`` an underscore stands for a hyphen and two underscores for a dot.
        """
        common = {
            "method": self.method,
            "model": str(self.model),
            "num-clients": self.num_clients,
            "threads": 1,
            "out-dir": str(self.folder / "runs"),
            "deadline-seconds": 5.0,
            "enrol-seconds": 5.0,
            "part-bytes": 1024,
            "data.num-samples": 2,
            "data.sequence-length": 16,
            "evaluation.texts": f"public={self.public}",
            "evaluation.sequence-length": 16,
            "evaluation.max-samples": 2,
            "evaluation.local-baseline": False,
            "evaluation.own-text": False,
            "evaluation.centralized": "off",
        }
        given = {key.replace("__", ".").replace("_", "-"): value for key, value in changes.items()}
        chosen = flatten(DEFAULTS) | common | self.settings | given
        of_others = (
            unread(chosen).keys()
            & (common.keys() - self.settings.keys() | self.settings.keys() - common.keys())
            - given.keys()
        )
        return chosen | {key: value for key, value in default_values().items() if key in of_others}

    def grid(self, **changes: Any) -> InProcessGrid:
        """Return a grid with one connected node per site."""
        nodes = [
            {
                "partition-id": client,
                "num-partitions": self.num_clients,
                "data-path": str(self.folder / f"text-{client}.txt"),
            }
            for client in range(self.num_clients)
        ]
        return InProcessGrid(client_app.app.app, nodes, self.config(**changes))

    def run(self, grid: InProcessGrid | None = None, **changes: Any) -> Path:
        """Execute the ServerApp's work and return the run directory."""
        self._runs += 1
        grid = grid or self.grid(**changes)
        context = Context(10**self._runs, 0, {}, RecordDict(), self.config(**changes))
        folder = server_app.app.run_method(grid, context, self.time.clock())
        # Its files have the form in which the commands read them, whatever the method.
        open_run(folder)
        return folder

    def killed(
        self, when: Callable[[Header], bool], grid: InProcessGrid | None = None, **changes: Any
    ) -> Path:
        """Kill a run and return its directory.

        The run ends before the first message leaves whose header satisfies ``when``.
        """
        grid = grid or self.grid(**changes)
        before = self.runs()
        # A test may have set ``before_push`` already; its function still sees every other message.
        look = grid.before_push

        def kill(message: Message) -> None:
            if when(read(message.content).header):
                raise Killed
            look(message)

        grid.before_push = kill
        with suppress(Killed):
            raise AssertionError(f"{self.run(grid, **changes)} came to its end")
        # A resumed run makes no new directory.
        (folder,) = self.runs() - before or {Path(changes["resume_from"])}
        return folder

    def runs(self) -> set[Path]:
        """Return the directories of all runs so far."""
        return {file.parent for file in (self.folder / "runs").glob("*/run.json")}


def private_text(client: int) -> str:
    """Return passages that occur in no other client's text and in no evaluation text."""
    generator = random.Random(f"private {client}")
    words = [f"{word}{generator.randrange(1000)}" for word in WORDS]
    return "\n\n".join(" ".join(generator.choices(words, k=12)) for _ in range(30))


def model_files(folder: Path) -> dict[str, bytes]:
    """Return the pruned model and its masks, or the adapters, by file name.

    Model cards are left out because they contain the settings.
    """
    found = [
        *folder.glob("masks.safetensors"),
        *sorted(folder.glob("adapter/*")),
        *sorted(folder.glob("model/*")),
    ]
    files = [file for file in found if file.name != "README.md"]
    assert files
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


def results(folder: Path) -> dict[str, bytes]:
    """Return every file of a run that must be reproducible, by name."""
    files = [file for file in sorted(folder.glob("checkpoint/**/*")) if file.is_file()] + sorted(
        folder.glob("*/README.md")
    )
    return model_files(folder) | {
        str(file.relative_to(folder)): file.read_bytes() for file in files
    }


def summary(folder: Path) -> dict[str, Any]:
    """Return ``summary.json`` without the times."""
    document: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    for entry in (document, *document["clients"]):
        entry.pop("seconds")
    return document


def events(folder: Path) -> list[dict[str, Any]]:
    """Return the events of ``metrics.jsonl``."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
