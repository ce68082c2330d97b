"""Federated SliceGPT (Ashkboos et al. 2024).

Paper: "SliceGPT: Compress Large Language Models by Deleting Rows and Columns".
Every client sends the second moments of its signals at every norm of the dense model (section 3.3).
The server averages them over all calibration samples. Up to float32 rounding, it finds the same
principal components as a centralized run with all samples. It rotates the residual stream onto
them, with one basis per norm, and deletes the minor ones (section 3.4). Alternatively the signals
are those of a public text, and clients send nothing.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from espalier.hf.opening.opened_model import OpenedModel, check_labels
from espalier.hf.sliced.export import require_sliceable
from espalier.hf.sliced.rotated_checkpoint import SlicedModel
from espalier.hf.sliced.signals import basis_of, mean_moments
from espalier.hf.stream.block_stream import BlockStream
from espalier.hf.stream.input_statistics import pack_statistics, read_statistics
from espalier.messages.message import MessageBody, NoFields
from espalier.methods.pruning.slicegpt import (
    BASIS,
    MOMENTS,
    SliceGptSettings,
    dense_width,
    moment_scale,
    places,
)
from espalier.settings.run import RunSettings
from espalier.storage.blobs import BlobStore
from pruning_kernels.groups.slicing import unpacked
from pruning_kernels.lora.clipping import MIN_CLIENTS, SINGLE_NUMBERS, limited_moments
from strategies.averaging.client_weights import count_claims
from strategies.averaging.updates import UpdateLimits
from strategies.base.evaluation import ClientEvaluation
from strategies.base.inbox import Inbox
from strategies.base.method import Method, ProgressWords, RunResult
from strategies.base.public_samples import public_samples, require_public_text
from strategies.base.roster import Seat
from strategies.base.run import Run
from strategies.base.sums.unmasking import Sums


class SlicedResult(RunResult):
    """Sliced model, available when its bases are computed; they are in ``store``."""

    STATE = ("bases", "kept")

    def __init__(self, model: OpenedModel, store: BlobStore, width: int) -> None:
        self.base = model
        self.store = store
        self.width = width
        """Width of the residual stream after slicing."""
        self.bases: list[str] = []
        """Hash of each place's blob."""
        self.kept: list[float] = []
        """Fraction of the signals' squared norm that each basis retains."""

    def stored(self) -> list[str]:
        """Return the hashes of all blobs that the state names."""
        return self.bases

    def take(self, moments: Tensor) -> float:
        """Compute and store the basis of the next place; return the fraction that it retains."""
        # One basis per place; the moments themselves are not stored.
        basis, kept = basis_of(moments, self.width)
        self.bases.append(self.store.put(pack_statistics({BASIS: basis})))
        self.kept.append(kept)
        return kept

    def blob(self, place: int) -> bytes:
        """Return the basis of a place as it is sent."""
        return self.store.get(self.bases[place])

    @property
    def model(self) -> SlicedModel:
        """Sliced model, whose tensors are computed when they are read."""

        def basis(place: int) -> Tensor:
            return read_statistics(self.blob(place))[BASIS]

        return SlicedModel(self.base, basis, self.width)

    def report(self) -> dict[str, Any]:
        """Return the widths before and after, and the fraction of the variance of each signal."""
        return {
            "width": self.width,
            "width_of_the_base": dense_width(self.base.plan),
            "explained_variance": self.kept,
        }


class SliceGpt(Method):
    """Strategy of SliceGPT: pooled second moments of clients, or those of a public text."""

    result: SlicedResult
    WORDS = ProgressWords("moments", "moments", "moments")

    def __init__(self, run: Run, evaluation: ClientEvaluation) -> None:
        super().__init__(run, evaluation)
        self.job = run.settings.of(SliceGptSettings)
        self.plan = run.model.plan
        self.limits = UpdateLimits(SINGLE_NUMBERS * run.settings.federation.update_limit)
        self.result = SlicedResult(
            run.model, run.checkpoint.blobs, self.job.width(dense_width(self.plan))
        )
        self._samples: dict[int, int] = {}
        """Number of samples that each client reported."""

    @classmethod
    def require_fit(
        cls, settings: RunSettings, model: OpenedModel, capabilities: Mapping[str, float]
    ) -> None:
        """Refuse a model that cannot be rotated, a width of 0, or an unusable public text."""
        check_labels(model.family, None, str(model.directory / "config.json"))
        require_sliceable(model)
        job = settings.of(SliceGptSettings)
        job.width(dense_width(model.plan))
        if job.covariances == "public":
            require_public_text(settings, job)
            # An estimate may have a configuration only.
            if model.has_tokenizer:
                public_samples(settings, job, model)

    def description(self) -> str:
        """Return the main settings in words."""
        whose = "all clients"
        if self.job.covariances == "public":
            whose = f"public text ({self.job.public_text})"
        width = dense_width(self.plan)
        return f"{self.result.width} of {width} components of the residual stream stay, by {whose}"

    def before_round(self, server_round: int) -> bool:
        """Compute the bases from public text at the server, if the settings say so."""
        # Nothing was decided for clients' moments, so no checkpoint is needed before the messages.
        if self.job.covariances == "clients":
            return False
        samples = public_samples(self.run.settings, self.job, self.run.model)
        self._find(mean_moments(BlockStream(self.run.model, self.run.computing), samples))
        # The bases are in the checkpoint: a resumed run need not compute them again.
        return True

    def note_part(self, seat: Seat, body: MessageBody) -> None:
        """Record the number of samples."""
        if body.header.kind == "train":
            self._samples[seat.client] = body.fields["samples"]

    def fold(self, server_round: int, inbox: Inbox, clients: list[int]) -> None:
        """Pool the moments place by place, in client order, and compute the bases."""
        # Clients had nothing to send.
        if self.job.covariances == "public":
            return
        claimed = {client: float(self._samples[client] or 1) for client in clients}
        weights = count_claims(self.rounds, "weight", claimed)
        # A generator: moments of one place are in memory at a time.
        self._find(self._pooled(inbox, place, weights) for place in places(self.plan))
        self.limits.tell(self.rounds, "moments")

    def fold_sums(self, server_round: int, sums: Sums, clients: list[int]) -> None:
        """Compute the bases from the sums of the weighted moments."""
        settings = self.run.settings
        scale = moment_scale(self.plan, settings)
        total = sums.total_weight(settings, clients)
        self._find(
            unpacked(sums.mean(place, MOMENTS, scale, total), dense_width(self.plan))
            for place in places(self.plan)
        )

    def _pooled(self, inbox: Inbox, place: str, weights: Mapping[int, float]) -> Tensor:
        """Return the mean of the clients' limited moments at a place: (width, width), float64."""
        width = dense_width(self.plan)
        total = sum(weights.values())
        mean = torch.zeros(width * (width + 1) // 2, dtype=torch.float64)
        for client, weight in weights.items():
            # Second pass, with the mean known: the others' mean is the rest.
            mean += inbox.tensor(client, place, MOMENTS).to(torch.float64) * weight
        mean = unpacked(mean / total, width)
        excess = torch.zeros_like(mean)
        for client, weight in weights.items() if self._limits(weights) else ():
            moments = unpacked(inbox.tensor(client, place, MOMENTS).to(torch.float64), width)
            # The mean of the other clients is the bound for this one.
            others = (mean * total - moments * weight) / (total - weight)
            limited, largest = limited_moments(moments, others, self.limits.max_ratio)
            if limited is not moments:
                # What a limit takes from a client is subtracted from the mean, once for all
                # clients.
                excess += (moments - limited) * (weight / total)
                self.limits.note(client, place, largest, 1.0)
        return mean - excess

    def _limits(self, weights: Mapping[int, float]) -> bool:
        return len(weights) >= MIN_CLIENTS and not self.limits.off

    def _find(self, moments: Iterator[Tensor]) -> None:
        """Compute a basis for each place, one at a time."""
        names = places(self.plan)
        self.run.progress.begin("slicing", len(names))
        for name, moment in zip(names, moments, strict=True):
            kept = self.result.take(moment)
            self.run.progress.step(
                "sliced", f"{name}: {kept:.2%} of the signals kept", place=name, kept=kept
            )

    def push_result(self, server_round: int) -> None:
        """Push the bases to the clients, for the evaluation on their own text."""
        if self.run.settings.evaluation.own_text:
            # Bases are in the order of the places.
            numbers = {place: number for number, place in enumerate(places(self.plan))}
            self.rounds.push_all(
                server_round, NoFields(), lambda place: self.result.blob(numbers[place])
            )
