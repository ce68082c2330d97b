"""A small federation in this process: a tiny model, private texts, and a run of the real ServerApp over it."""

import json
import random
import tomllib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flwr.app import Context, Message, RecordDict
from in_process import FakeTime, InProcessGrid
from tiny_model import WORDS, save_tiny_llama

import client_app.app
import server_app.app
from espalier.settings.run import default_values, unread
from espalier.wire.messages import Header, read

ROOT = Path(__file__).parent.parent
server_app.app.tell_plan = lambda *_, **__: None  # a bench has many runs, whose plans nobody reads
server_app.app.tell_time_of_sites = lambda *_: None
DEFAULTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]


def flatten(nested: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted keys, as Flower hands them out."""
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        flat |= (
            flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
        )
    return flat


LOCAL_ONLY = {"evaluation.local-only": True}
EVALUATED = LOCAL_ONLY | {"evaluation.own-text": True, "evaluation.centralized": "auto"}
"""All comparisons that a run can make; without them a run of a bench takes a third of the time."""


class Killed(SystemExit):
    """The ServerApp's process is gone."""


@dataclass(frozen=True)
class Home:
    """What benches may share: a tiny model and a public text. Runs over equal paths have equal settings, so equal bytes."""

    model: Path
    public: Path


def home(folder: Path) -> Home:
    """Make them in a folder."""
    model = save_tiny_llama(folder / "base")
    (folder / "public.txt").write_text("\n\n".join(private_text(99).split("\n\n")[:15]))
    return Home(model, folder / "public.txt")


@dataclass
class Bench:
    """``num_clients`` sites with a private text each; every run gets a fresh grid over the same sites.

    The dense and the federated model are evaluated on two windows of the public text; see ``EVALUATED`` for the others.
    """

    folder: Path
    method: str
    settings: dict[str, Any]
    num_clients: int = 4
    time: FakeTime = field(default_factory=FakeTime)
    home: Home | None = None
    """Model and public text, where they are not made in ``folder``."""

    def __post_init__(self) -> None:
        shared = self.home or home(self.folder)
        self.model = shared.model
        self.public = shared.public
        for client in range(self.num_clients):
            (self.folder / f"text-{client}.txt").write_text(private_text(client))
        self._runs = 0

    def config(self, **changes: Any) -> dict[str, Any]:
        """The run configuration, flat; ``changes`` use underscores for hyphens and two for dots."""
        common = {
            "method": self.method,
            "model": str(self.model),
            "num-clients": self.num_clients,
            "threads": 1,
            "out-dir": str(self.folder / "runs"),
            "deadline-seconds": 5.0,
            "enrol-seconds": 5.0,
            "part-bytes": 1024,
            "data.windows": 2,
            "data.window-tokens": 16,
            "evaluation.texts": f"public={self.public}",
            "evaluation.window-tokens": 16,
            "evaluation.max-windows": 2,
            "evaluation.local-only": False,
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
        """A grid with one connected node per site."""
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
        """Run the ServerApp's work and return the run directory."""
        self._runs += 1
        grid = grid or self.grid(**changes)
        context = Context(10**self._runs, 0, {}, RecordDict(), self.config(**changes))
        return server_app.app.run_method(grid, context, self.time.clock())

    def killed(
        self, when: Callable[[Header], bool], grid: InProcessGrid | None = None, **changes: Any
    ) -> Path:
        """The directory of a run whose process is gone before the first message with such a header leaves."""
        grid = grid or self.grid(**changes)
        before = self.runs()
        look = grid.before_push

        def kill(message: Message) -> None:
            if when(read(message.content).header):
                raise Killed
            look(message)

        grid.before_push = kill
        with suppress(Killed):
            raise AssertionError(f"{self.run(grid, **changes)} came to its end")
        (folder,) = self.runs() - before or {Path(changes["resume_from"])}
        return folder

    def runs(self) -> set[Path]:
        """The directories of all runs so far."""
        return set((self.folder / "runs").glob("*"))


def private_text(client: int) -> str:
    """Passages that no other client and no public text has."""
    generator = random.Random(f"private {client}")
    words = [f"{word}{generator.randrange(1000)}" for word in WORDS]
    return "\n\n".join(" ".join(generator.choices(words, k=12)) for _ in range(30))


def model_files(folder: Path) -> dict[str, bytes]:
    """The pruned model and its masks, or the adapters, by file name; without the cards, which tell the settings."""
    found = [
        *folder.glob("masks.safetensors"),
        *sorted(folder.glob("adapter/*")),
        *sorted(folder.glob("model/*")),
    ]
    files = [file for file in found if file.name != "README.md"]
    assert files
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


def results(folder: Path) -> dict[str, bytes]:
    """Every file of a run that must repeat, by name."""
    files = [file for file in sorted(folder.glob("checkpoint/**/*")) if file.is_file()] + sorted(
        folder.glob("*/README.md")
    )
    return model_files(folder) | {
        str(file.relative_to(folder)): file.read_bytes() for file in files
    }


def summary(folder: Path) -> dict[str, Any]:
    """``summary.json`` without times."""
    document: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    for entry in (document, *document["clients"]):
        entry.pop("seconds")
    return document


def events(folder: Path) -> list[dict[str, Any]]:
    """``metrics.jsonl``."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
