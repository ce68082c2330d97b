"""Summary of a run, with the same format for every method, and the file of masks."""

import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import version
from pathlib import Path
from statistics import median_low
from typing import Any

import torch

import espalier
from espalier.evaluation.perplexity import perplexity
from espalier.hf.files.checkpoint import write_shard
from espalier.hf.opening.model_files import commit_of
from espalier.hf.opening.opened_model import OpenedModel
from espalier.messages.evaluation import OWN_TEXT_MODELS
from espalier.messages.ledger import Traffic
from espalier.messages.tensor_blobs import TensorSpec
from espalier.privacy.guarantee import guarantee_of
from espalier.results.base_chain import chain_of, model_name
from espalier.results.figures import Size
from espalier.results.finished_run import SUMMARY_VERSION
from espalier.settings.pruning import PersonalModelSettings
from espalier.settings.run import RunSettings
from espalier.settings.tables.evaluation import OWN_TEXT
from espalier.storage.atomic import finite_values, write_json
from pruning_kernels.votes.bitmask import Words, count, num_words
from server_app.report.result_size import larger_than_base, size_of_base, size_of_result
from strategies.base.evaluation import ClientFigures
from strategies.base.roster import Roster
from strategies.base.run_folder import RunFolder
from strategies.fleet import RoundTime, seconds_of_all

COLUMNS = ("dense", "local_baseline", "centralized", "federated")
SPARSITY_DEFINITION = (
    "weights that the method set to zero / weights of the decoder blocks' linear layers"
    " (without embeddings, norms, biases and head)"
)
LIBRARIES = ("flwr", "torch", "transformers", "safetensors", "numpy")


def save_masks(
    model: OpenedModel, masks_of: Callable[[int], Mapping[str, Words]], path: Path
) -> float:
    """Write ``masks.safetensors`` block by block, and return the fraction of pruned weights.

    The fraction refers to prunable weights. The file contains one flat packed mask (U64) per pruned
    tensor, under the tensor's own name.

    Parameters
    ----------
    model : model that the masks belong to
    masks_of : function that returns the packed prune masks of a block by canonical linear name
    path : path of the file
    """
    specs = {
        linear.parameter: TensorSpec("U64", (num_words(linear.num_weights),))
        for linear in model.plan.linears
    }
    layout = "1 = pruned; one bit per weight, row-major, little-endian in 64-bit words"
    pruned: list[int] = []

    # A generator: masks of one block are in memory at a time.
    def masks() -> Iterator[tuple[str, torch.Tensor]]:
        for block in model.plan.blocks:
            words = masks_of(block.index)
            for linear in block.linears:
                # Counted while writing, so that masks are read once.
                pruned.append(count(words[linear.name]))
                yield linear.parameter, torch.from_numpy(words[linear.name].copy())

    write_shard(path, specs, masks(), {"layout": layout})
    return sum(pruned) / model.plan.num_weights


@dataclass(frozen=True)
class Metric:
    """One measure by which models are compared, by column of the table."""

    name: str
    dataset: str
    of_one: Mapping[str, float]
    """Values of columns that are one model for all clients."""
    of_clients: Mapping[str, Mapping[int, float]]
    """Clients' values of columns that differ between clients; they replace those of one model."""
    direction: str = "lower"
    """Whether a lower or a higher value is better."""
    digits: int = 2
    """Decimal places in the table."""
    others: Mapping[str, Any] = field(default_factory=dict)
    """Further entries of ``summary.json``."""

    def value(self, column: str) -> float | None:
        """Return the value, or the mean over clients; None if the column does not apply."""
        if column not in self.of_clients:
            return self.of_one.get(column)
        values = self.of_clients[column].values()
        # A column that belongs to single clients is shown as their mean.
        return sum(values) / len(values) if values else None

    def over_clients(self, choose: Callable[[Iterable[float]], float]) -> dict[str, float]:
        """Return what ``choose`` makes of the clients' values, by column."""
        client_values = {column: self.of_clients.get(column, {}).values() for column in COLUMNS}
        return {column: choose(values) for column, values in client_values.items() if values}

    def medians(self) -> dict[str, float]:
        """Return the median over clients by column, which a single client cannot distort.

        For an even number of clients it is the lower of the two middle values.
        """
        return self.over_clients(median_low)

    def to_json(self) -> dict[str, Any]:
        """Return the entry of ``summary.json``."""
        return {
            "name": self.name,
            "dataset": self.dataset,
            "direction": self.direction,
            **self.others,
            "values": {column: self.value(column) for column in COLUMNS},
            "medians_of_clients": self.medians(),
            "worst_of_clients": self.over_clients(max if self.direction == "lower" else min),
        }


@dataclass
class Summary:
    """Contents of ``summary.json``; fields that a run did not reach are null."""

    settings: RunSettings
    model: OpenedModel
    threads: int
    device: str
    roster: Roster = field(default_factory=Roster)
    rounds: int = 0
    sparsity: float | None = None
    """Sparsity of the result: fraction of prunable weights that are zero."""
    masked: float | None = None
    """Fraction of prunable weights that are masked."""
    local_sparsity: float | None = None
    """Sparsity of the local baselines, as a fraction of prunable weights."""
    centralized_sparsity: float | None = None
    """Sparsity of the centralized baseline, as a fraction of prunable weights."""
    zeroed: bool = False
    """True if weights were set to zero: the result has the size of its base, and a sparsity."""
    sizes: dict[str, Size] = field(default_factory=dict)
    """column -> size of the model, if known; for ``federated`` as it was written."""
    warnings: list[str] = field(default_factory=list)
    """Warnings about the result, one sentence each."""
    report: dict[str, Any] = field(default_factory=dict)
    """Values that only this method reports."""
    losses: dict[str, dict[str, float | None]] = field(default_factory=dict)
    """text -> column -> mean loss in nats; ``local_baseline``, a mean of perplexities, is apart."""
    local_perplexities: dict[str, dict[int, float]] = field(default_factory=dict)
    """text -> client -> perplexity of the client's local baseline, or own model (``personal``)."""
    own_text: dict[int, dict[str, float]] = field(default_factory=dict)
    """client -> model -> perplexity on the client's own held-out text."""
    scores: dict[str, dict[str, float]] = field(default_factory=dict)
    """metric -> column -> score on the task's public items; ``local_baseline`` is stored apart."""
    local_scores: dict[str, dict[int, float]] = field(default_factory=dict)
    """metric -> client -> score of the client's local baseline, or own model (``personal``)."""
    personal: bool = False
    """True if each client has its own model of the federated result, which it evaluates."""
    tests: dict[str, int] = field(default_factory=dict)
    """Number of scored public items, and of those that were truncated; empty if there are none."""
    samples_sha256: dict[str, str] = field(default_factory=dict)
    """dataset -> hash of the tokens on which models were evaluated at the server."""
    chances: dict[str, float] = field(default_factory=dict)
    """metric -> score of a model at chance level."""
    notes: list[str] = field(default_factory=list)
    """Notes on the numbers of the table, one sentence each."""
    seconds: float = 0.0
    virtual_seconds: float | None = None
    """Seconds that the rounds would take on the devices of the simulated fleet."""
    rounds_of: dict[int, list[dict[str, float]]] = field(default_factory=dict)
    """client -> for each of its rounds: number, seconds, and bytes without headers and fields."""
    where: str = ""
    """Sentence that names the location of the result."""

    def take_figures(
        self, figures: ClientFigures, texts: Sequence[str], metrics: Sequence[str]
    ) -> None:
        """Record the clients' evaluation of texts and items, which are in the order sent."""
        for client, losses in sorted(figures.losses.items()):
            for text, loss in zip(texts, losses, strict=True):
                self.local_perplexities.setdefault(text, {})[client] = perplexity(loss)
        for client, scores in sorted(figures.test_scores.items()):
            for metric, value in zip(metrics, scores, strict=True):
                self.local_scores.setdefault(metric, {})[client] = value
        for client, losses in sorted(figures.own_losses.items()):
            self.own_text[client] = dict(zip(OWN_TEXT_MODELS, map(perplexity, losses), strict=True))

    def take_personal_figures(self) -> None:
        """Assign the clients' evaluation to the federated result: each has its own model of it."""
        self.personal = True
        if not (self.local_perplexities or self.local_scores):
            return
        self.notes.append("Federated is the mean over clients, each with its own smaller model.")

    def take_sizes(self, run_directory: Path) -> None:
        """Record the sizes of base and result, and warn if the result is larger."""
        base = self.sizes["dense"] = size_of_base(self.model)
        result = size_of_result(
            run_directory, personal=isinstance(self.settings.job, PersonalModelSettings)
        )
        if result is not None:
            self.sizes["federated"] = result
        if self.zeroed:
            self.sizes |= {
                column: Size(base.parameters) for column in ("local_baseline", "centralized")
            }
        self.warnings += larger_than_base(base, result, self.settings)

    def take_times(self, rounds: Sequence[RoundTime], named: str = "virtual_seconds") -> None:
        """Record the times of finished rounds.

        Parameters
        ----------
        rounds : notes of the rounds
        named : ``virtual_seconds`` by the clock of a simulated fleet, or ``seconds`` that clients
            measured
        """
        # A failed run may have notes of a round that was not finished.
        rounds = [note for note in rounds if note.round <= self.rounds]
        if not rounds:
            return
        for client, seat in self.roster.seats.items():
            devices = [
                (note.round, note.devices[client]) for note in rounds if client in note.devices
            ]
            self.rounds_of[client] = [
                {"round": number, named: device.seconds, "bytes": device.num_bytes}
                for number, device in devices
            ]
            if named == "virtual_seconds":
                seat.metrics[named] = sum(device.seconds for _, device in devices)
        if named == "virtual_seconds":
            self.virtual_seconds = seconds_of_all(rounds)

    @property
    def _column_of_clients(self) -> str:
        return "federated" if self.personal else "local_baseline"

    def metrics(self) -> list["Metric"]:
        """Return all metrics by which models are compared: perplexities, then scores."""
        texts = [*self.losses, *([OWN_TEXT] if self.own_text else [])]
        return [*map(self._perplexity, texts), *map(self._score, self.scores)]

    def _perplexity(self, text: str) -> "Metric":
        """Return the perplexity on a text."""
        losses = self.losses.get(text, {})
        values = {column: perplexity(loss) for column, loss in losses.items() if loss is not None}
        # With personal models the clients' figures are those of the federated result.
        client_values = {self._column_of_clients: self.local_perplexities.get(text, {})}
        # Held-out text has figures of clients only.
        if text == OWN_TEXT:
            client_values = {
                column: {
                    client: figures[column]
                    for client, figures in self.own_text.items()
                    if column in figures
                }
                for column in COLUMNS
            }
        return Metric("perplexity", text, values, client_values, others=self._samples(text))

    def _score(self, metric: str) -> "Metric":
        """Return a score on the task's items."""
        client_values = {self._column_of_clients: self.local_scores.get(metric, {})}
        dataset = self.settings.task.name
        others = {"chance": self.chances.get(metric), **self._samples(dataset)}
        direction = "lower" if metric == "loss" else "higher"
        return Metric(metric, dataset, self.scores[metric], client_values, direction, 3, others)

    def _samples(self, dataset: str) -> dict[str, str]:
        """Return the hash of the samples of a dataset; empty for the clients' own text."""
        hashes = self.samples_sha256
        return {"samples_sha256": hashes[dataset]} if dataset in hashes else {}

    def write(
        self,
        folder: RunFolder,
        status: str,
        reason: str | None,
        traffic: Traffic,
        *,
        nobody_asked: bool = False,
    ) -> None:
        """Write ``summary.json``, with null for values that are NaN or infinite.

        With ``nobody_asked`` no client was asked yet, so that finished and missing clients are left
        out.
        """
        missing = [] if nobody_asked else self.roster.missing(self.settings.num_clients)
        guarantee = guarantee_of(self.settings)
        document = {
            "schema_version": SUMMARY_VERSION,
            "status": status,
            "reason": reason,
            "method": self.settings.method,
            "seed": self.settings.seed,
            "num_clients": self.settings.num_clients,
            "clients": self._clients(folder),
            "finished": None if nobody_asked else self.roster.finished(),
            "missing": [{"site": who, "reason": why} for who, why in missing],
            "refused": self.roster.refused,
            "rounds": self.rounds,
            "sparsity": {
                "achieved": self.sparsity,
                "masked": self.masked,
                "local": self.local_sparsity,
                "definition": SPARSITY_DEFINITION,
            },
            "size": {column: size.to_json() for column, size in self.sizes.items()},
            "warnings": self.warnings,
            "privacy": None if guarantee is None else guarantee.to_json(),
            "report": self.report,
            "metrics": [metric.to_json() for metric in self.metrics()],
            "test_items": self.tests or None,
            "bytes_up": traffic.up,
            "bytes_down": traffic.down,
            "seconds": round(self.seconds, 3),
            "virtual_seconds": self.virtual_seconds,
            "model": model_name(self.model),
            "model_revision": commit_of(self.model.directory),
            "model_sha256": self.model.sha256,
            "base": [link.to_json() for link in chain_of(self.model)],
            "versions": versions(),
            "threads": self.threads,
            "device": self.device,
        }
        # JSON has no NaN; the text next to a number gives the reason.
        write_json(folder.path / "summary.json", finite_values(document))

    def _clients(self, folder: RunFolder) -> list[dict[str, Any]]:
        clients = []
        for client, seat in sorted(self.roster.seats.items()):
            traffic = folder.ledger.by_client.get(client, Traffic())
            local = {
                f"perplexity/{text}{'/federated' if self.personal else ''}": values.get(client)
                for text, values in self.local_perplexities.items()
                if client in values or not self.personal
            }
            local |= {
                f"{metric}/{self.settings.task.name}": values.get(client)
                for metric, values in self.local_scores.items()
            }
            local |= {
                f"perplexity/{OWN_TEXT}/{model}": value
                for model, value in self.own_text.get(client, {}).items()
            }
            clients.append(
                {
                    "client": client,
                    "site": seat.site,
                    "status": seat.status,
                    "reason": seat.reason or None,
                    "capped": seat.capped,
                    "bytes_up": traffic.up,
                    "bytes_down": traffic.down,
                    "seconds": round(seat.seconds, 3),
                    "metrics": {**seat.metrics, **local},
                    **({"rounds": self.rounds_of[client]} if client in self.rounds_of else {}),
                }
            )
        return clients


@cache
def versions() -> Mapping[str, str]:
    """Return the versions of this program, Python and the libraries that affect a result's bits."""
    # Local builds, such as ``2.8.0+cpu``, count as their release.
    libraries = {name: version(name).split("+")[0] for name in LIBRARIES}
    return {"espalier": espalier.__version__, "python": platform.python_version(), **libraries}
