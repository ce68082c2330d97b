"""Complete runs of the app in this process; results are stored, so that no run is repeated."""

import contextlib
import hashlib
import io
import json
import os
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from flwr.app import Context, Message, RecordDict
from safetensors.torch import load
from torch import Tensor

from benchmarks.fedsoda.cells import FEDPETUNING, IID, IN_DOMAIN, METHODS, Cell, rounds
from benchmarks.fedsoda.sources import Sources
from client_app.app import app
from espalier.data.client_items import as_tests, public_items
from espalier.data.tasks.catalogue import task_of
from espalier.data.tasks.item import Item
from espalier.data.tasks.scored_items import ScoredItems
from espalier.evaluation.scores import chance_of_options, majority_share, score, uniform_loss
from espalier.hf.machine.computing import Computing
from espalier.hf.opening.opened_model import OpenedModel
from espalier.messages.records import read
from espalier.methods.tuning.adapters.tensors import trained
from espalier.models.plan import block_key
from espalier.settings.run import RunSettings, parse
from espalier.storage.atomic import write_json
from espalier.storage.blobs import BlobStore
from espalier.training.adapted_model import AdaptedModel
from espalier.training.initial_values import initial_adapters
from server_app.app import run_method
from tests.in_process import InProcessGrid

Scores = dict[str, float]
Adapters = dict[str, dict[str, Tensor]]
TEST_BATCH = 16
"""Number of items that are scored together; it affects scores only by rounding."""
PATHS = ("model", "data.path", "task.test-path", "public.text", "evaluation.texts")
"""Settings that name files; all others identify a result."""


@dataclass
class Bench:
    """Common data of all runs.

    Parameters
    ----------
    model, computing : full model, threads and device
    common : settings of the run that no cell varies, flat
    sources : files that runs read
    work : folder of the results
    inputs : hashes of model and data, which are part of a result's name
    """

    model: OpenedModel
    computing: Computing
    common: Mapping[str, Any]
    sources: Sources
    work: Path
    inputs: Mapping[str, str] = field(default_factory=dict)

    def settings(self, cell: Cell, seed: int) -> dict[str, Any]:
        """Return the flat settings of one run."""
        settings = cell.settings(self.common) | {
            "seed": seed,
            "data.source": "files",
            "data.path": str(self.sources.clients),
        }
        settings["evaluation.texts"] = f"tested={self.sources.tested}"
        # Items are scored in this module, with the adapters of every method in the same full model.
        settings.pop("task.test-path", None)
        if settings["method"] == "fedsoda":
            sources = self.sources
            settings["public.text"] = str(
                sources.in_domain if cell.public == IN_DOMAIN else sources.out_of_domain
            )
        return settings

    def result(self, cell: Cell, seed: int) -> dict[str, Any]:
        """Return the result of a cell's run; do the run if there is no stored result."""
        settings = self.settings(cell, seed)
        named = {key: value for key, value in settings.items() if key not in PATHS}
        named |= {"public": cell.public if settings["method"] == "fedsoda" else "", **self.inputs}
        path = (
            self.work
            / f"{hashlib.sha256(json.dumps(named, sort_keys=True).encode()).hexdigest()[:16]}.json"
        )
        if not path.exists():
            found = self._run(settings, self._is_followed(cell))
            self.work.mkdir(parents=True, exist_ok=True)
            write_json(path, {"settings": named, **found})
        document: dict[str, Any] = json.loads(path.read_text())
        return document

    def _is_followed(self, cell: Cell) -> bool:
        """Return whether the loss of every round is needed."""
        same = (cell.settings(self.common), cell.public)
        return any((other.settings(self.common), other.public) == same for other in rounds())

    def _run(self, settings: Mapping[str, Any], followed: bool) -> dict[str, Any]:
        started = time.process_time()
        with tempfile.TemporaryDirectory() as scratch:
            run = watched_run(settings, Path(scratch))
            seconds = time.process_time() - started
            summary = json.loads((run.folder / "summary.json").read_text())
        clients = settings["num-clients"]
        report = summary["report"]
        perplexities = next(
            one["values"] for one in summary["metrics"] if one["name"] == "perplexity"
        )
        stored = report.get("sub_model_bytes") or sum(
            file.stat().st_size for file in files_of(self.model.directory)
        )
        return {
            "scores": self.score(run.after[-1]),
            "losses": (
                [self.score(adapters, self._right)["loss"] for adapters in run.after]
                if followed
                else []
            ),
            "perplexity": perplexities["federated"],
            "dense_perplexity": perplexities["dense"],
            "sub_model_perplexity": report.get("sub_model_perplexity", {}).get("tested"),
            "bytes_up": summary["bytes_up"] / clients,
            "bytes_down": (summary["bytes_down"] - run.model_bytes) / clients,
            "bytes_stored": stored,
            "trained": report["trained_parameters"],
            "dropped": report.get("dropped_blocks", []),
            "cpu_seconds": seconds,
        }

    # ----- scores ---------------------------------------------------------------------------------

    @cached_property
    def plain(self) -> RunSettings:
        """Settings with which every block of the full float32 model has adapters."""
        tested = {"task.test-path": self.common["task.test-path"]}
        return parse(self.settings(Cell(FEDPETUNING, IID, METHODS[FEDPETUNING]), 0) | tested)

    @cached_property
    def items(self) -> ScoredItems:
        """Test items."""
        return self._encoded(public_items(self.plain))

    @cached_property
    def _right(self) -> ScoredItems:
        """Test items with only their right options, for losses."""
        whole = public_items(self.plain)
        return self._encoded(
            [
                replace(item, contexts=(item.prompt,), options=(item.gold,), answer=0)
                for item in whole
            ]
        )

    def _encoded(self, items: list[Item]) -> ScoredItems:
        return as_tests(self.plain, items, self.model)

    @cached_property
    def _adapted(self) -> AdaptedModel:
        return AdaptedModel.load(
            self.model, self.computing, self.plain, trained(self.model.plan, self.plain)
        )

    def score(self, adapters: Adapters, items: ScoredItems | None = None) -> Scores:
        """Return the scores of the full model with adapters in some of its blocks.

        Other blocks have initial adapters, which do not change the model.
        """
        first = initial_adapters(trained(self.model.plan, self.plain), self.plain.seed)
        self._adapted.set({**first, **adapters})
        return score(
            self._adapted.whole, items or self.items, False, TEST_BATCH, self.computing.device
        )

    @cached_property
    def dense(self) -> Scores:
        """Scores of the full model without adapters."""
        return self.score({})

    @cached_property
    def chance(self) -> Scores:
        """Scores of a model that has learned nothing.

        Accuracies are those of guessing, or of the most frequent class.
        """
        items = public_items(self.plain)
        share = majority_share(items) if task_of(self.plain).classes else chance_of_options(items)
        return {
            "loss": uniform_loss(len(self.model.tokenizer)),
            **{name: share for name in self.dense if name != "loss"},
        }


@dataclass
class Watched:
    """Run of the app with its intermediate adapters."""

    folder: Path
    """Directory of the run."""
    after: list[Adapters]
    """Global adapters after each round, with the full model's block numbers."""
    model_bytes: int
    """Bytes of the sub-model's pieces that were sent.

    Clients of one machine share the files, so only the first one receives them.
    """


def watched_run(settings: Mapping[str, Any], scratch: Path) -> Watched:
    """Do a run, and read its messages and checkpoints."""
    os.environ["ESPALIER_STATE_DIR"] = str(scratch / "state")
    config = {**settings, "out-dir": str(scratch / "runs"), "enrol-seconds": 1.0}
    number = settings["num-clients"]
    after = list[Adapters]()
    pieces = list[int]()
    nodes = [{"partition-id": client, "num-partitions": number} for client in range(number)]
    grid = InProcessGrid(app, nodes, config)

    def look(message: Message) -> None:
        body = read(message.content)
        header = body.header
        if body.fields.get("what") == "piece":
            pieces.append(body.fields["size"])
        if header.kind == "train" and header.server_round == len(after) + 2:
            (folder,) = (scratch / "runs").iterdir()
            after.append(kept_adapters(folder))

    grid.before_push = look
    with contextlib.redirect_stdout(io.StringIO()):
        folder = run_method(grid, Context(1, 0, {}, RecordDict(), config))
    after.append(kept_adapters(folder))
    if len(after) != settings["federation.rounds"]:
        raise RuntimeError(
            f"{folder}: {len(after)} rounds were seen of {settings['federation.rounds']}"
        )
    return Watched(folder, after, sum(pieces))


def kept_adapters(folder: Path) -> Adapters:
    """Return the global adapters in a run's checkpoint, with the full model's block numbers."""
    state = json.loads((folder / "checkpoint" / "state.json").read_text())["state"]
    store = BlobStore(folder / "checkpoint" / "blobs")
    dropped = state.get("dropped") or []
    blobs = state.get("adapter", state)["blobs"]
    return {
        block_key(full_number(int(key.rpartition("-")[2]), dropped)): load(store.get(blob))
        for key, blob in blobs.items()
    }


def full_number(index: int, dropped: list[int]) -> int:
    """Return the full model's number of a sub-model's block."""
    for gone in sorted(dropped):
        index += gone <= index
    return index


def files_of(directory: Path) -> list[Path]:
    """Return the weight files of a model."""
    return sorted(directory.glob("*.safetensors"))
