"""Federation of clients that tune adapters in this process, with the functions of the app.

It has no messages, contracts or client state. With the wire dtype float32, which is lossless, the
adapters equal those of the app bit by bit, for FedPETuning and for HetLoRA without self-pruning
(``tests/studies`` compares them). A client's first round does not depend on others, so it is
computed once for all averages and for the local baseline.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, reduce
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from espalier.data.client_items import as_tests, client_items
from espalier.data.tasks.scored_items import ScoredItems
from espalier.errors import EspalierError, InputError
from espalier.evaluation.scores import score
from espalier.hf.machine.computing import Computing
from espalier.hf.opening.opened_model import OpenedModel
from espalier.hf.whole.adapters import factors_of
from espalier.messages.blobs.adapters import unpack_adapters
from espalier.methods.tuning.adapters.tensors import trained
from espalier.models.adapters import HEAD_KEY, Adapter, Tensors
from espalier.models.plan import block_key
from espalier.seeds import derive_seed
from espalier.settings.node import simulated_node
from espalier.settings.run import RunSettings
from espalier.storage.blobs import BlobStore
from espalier.training.adapted_model import AdaptedModel
from espalier.training.adapter_training import AdapterTraining
from espalier.training.initial_values import initial_adapters
from espalier.training.loop import Moments
from espalier.training.sequences import Sequences, client_sequences
from pruning_kernels.lora.factor_means import weighted_mean, zero_padded_mean
from pruning_kernels.lora.factors import Factors, norm
from strategies.averaging.adapters import AdapterResult


@dataclass(frozen=True)
class Averaging:
    """Averaging by the server."""

    of: Literal["factors", "updates"]
    """Averaged quantity.

    ``factors``: mean of A and of B, padded with zeros. ``updates``: mean of B A, reduced to the
    adapters' rank by an SVD.
    """
    weights: Literal["samples", "norms"] = "samples"
    """Weights of the clients; ``norms`` are those of their updates (Cho et al. 2024)."""


@dataclass
class Federated:
    """Result of a federation."""

    tensors: Tensors
    errors: list[float] = field(default_factory=list)
    """Relative Frobenius distance of the averaged update from the exact mean, per round."""
    errors_at_clients: list[float] = field(default_factory=list)
    """The same distance for the first ranks that a client receives, averaged over clients."""


class Federation:
    """Clients of a run with these settings, and its server.

    Parameters
    ----------
    settings : settings of FedPETuning, with a task and the wire dtype float32
    model : base model
    computing : threads and device
    scratch : directory for the server's data
    limits : maximum rank of each client's adapters; None means the full rank for all clients
    sequences : training data of each client, if known; None means those of the settings

    Raises
    ------
    InputError
        No client has anything to train on.
    """

    def __init__(
        self,
        settings: RunSettings,
        model: OpenedModel,
        computing: Computing,
        scratch: Path,
        limits: Sequence[int] | None = None,
        sequences: Mapping[int, Sequences] | None = None,
    ) -> None:
        if settings.federation.wire_dtype != "float32":
            raise ValueError(
                f"a federation without messages sends float32, not {settings.federation.wire_dtype}"
            )
        self.settings = settings
        self.model = model
        self.computing = computing
        self.scratch = scratch
        self.adapters = trained(model.plan, settings)
        self.limits = list(limits or [settings.lora.rank] * settings.num_clients)
        self._adapted: dict[int, AdaptedModel] = {}
        self._first: dict[int, tuple[dict[str, dict[str, Tensor]], Moments]] = {}
        self.sequences = dict(sequences or self._all_sequences())
        if not self.sequences:
            raise InputError("data: no client has items to train on")

    def _all_sequences(self) -> dict[int, Sequences]:
        """Return the training data of each client.

        As in the app, clients without data are left out.
        """
        found: dict[int, Sequences] = {}
        for client in range(self.settings.num_clients):
            try:
                found[client] = client_sequences(
                    self.settings, simulated_node(), self.model, client
                )
            except EspalierError as error:
                print(f"client {client} is left out: {error}", flush=True)
        return found

    @cached_property
    def own_tests(self) -> dict[int, ScoredItems]:
        """Held-out items of each client, at most ``task.max-test-items``.

        Clients without held-out items have no entry.
        """
        most = self.settings.task.max_test_items or None
        held = {
            client: list(client_items(self.settings, simulated_node(), client)[1][:most])
            for client in self.sequences
        }
        return {
            client: as_tests(self.settings, items, self.model)
            for client, items in held.items()
            if items
        }

    # ----- training -------------------------------------------------------------------------------

    def _training(self, client: int) -> AdapterTraining:
        settings = self.settings
        limit = self.limits[client]
        adapters = self.adapters.limited(limit)
        seed = derive_seed(settings.seed, "training", client=client)
        training = AdapterTraining(
            self.model, self.computing, settings, adapters, self.sequences[client], seed
        )
        training.adapted = self._model_of(limit)
        return training

    def _model_of(self, limit: int) -> AdaptedModel:
        """Return the model of a rank limit; clients with the same limit share it."""
        if limit not in self._adapted:
            adapters = self.adapters.limited(limit)
            self._adapted[limit] = AdaptedModel.load(
                self.model, self.computing, self.settings, adapters
            )
        return self._adapted[limit]

    def _start(self, client: int) -> dict[str, dict[str, Tensor]]:
        """Return a client's initial adapters, and the initial head of an encoder."""
        adapters = self.adapters.limited(self.limits[client])
        return initial_adapters(adapters, self.settings.seed) | self._first_head

    @cached_property
    def _first_head(self) -> dict[str, dict[str, Tensor]]:
        values = self._model_of(self.adapters_rank).values()
        return {HEAD_KEY: values[HEAD_KEY]} if HEAD_KEY in values else {}

    @property
    def adapters_rank(self) -> int:
        """Maximum rank of the global adapters."""
        return self.settings.lora.rank

    def _first_round(self, client: int) -> tuple[dict[str, dict[str, Tensor]], Moments]:
        """Return a client's adapters after the first round, and its optimizer's moments."""
        if client not in self._first:
            tensors, outcome = self._training(client).run(
                self._start(client), 0, self.settings.training.steps
            )
            self._first[client] = tensors, outcome.moments
        return self._first[client]

    def alone(self, client: int) -> dict[str, dict[str, Tensor]]:
        """Return a client's local baseline, with as many steps as in all rounds."""
        tensors, moments = self._first_round(client)
        training = self._training(client)
        steps = self.settings.training.steps
        if training.total_steps > steps:
            tensors, _ = training.run(tensors, steps, training.total_steps - steps, moments)
        return tensors

    def centralized(self) -> dict[str, dict[str, Tensor]]:
        """Return the centralized baseline, with as many steps as all clients together."""
        settings = self.settings
        parties = self.settings.num_clients
        joined = reduce(lambda first, other: first.joined(other), self.sequences.values())
        seed = derive_seed(settings.seed, "training/centralized")
        training = AdapterTraining(
            self.model, self.computing, settings, self.adapters, joined, seed, parties
        )
        training.adapted = self._model_of(self.adapters_rank)
        start = initial_adapters(self.adapters, settings.seed) | self._first_head
        tensors, _ = training.run(start, 0, training.total_steps)
        return tensors

    def federated(self, averaging: Averaging) -> Federated:
        """Run all rounds, each with all clients."""
        result = AdapterResult(self.settings, self.model, BlobStore(self.scratch))
        steps = self.settings.training.steps
        found = Federated({})
        for number in range(self.settings.federation.rounds):
            sent: dict[int, Tensors] = {}
            for client in self.sequences:
                if number == 0:
                    sent[client] = self._first_round(client)[0]
                else:
                    sent[client], _ = self._training(client).run(
                        self._received(result, client), number * steps, steps
                    )
            weights = self._weights(sent, averaging)
            result.replace(self._folded(sent, weights, averaging), self.limits)
            found.tensors = {key: result.tensors(key) for key in self.adapters.shapes()}
            whole, cut = self._errors(found.tensors, sent, weights)
            found.errors.append(whole)
            found.errors_at_clients.append(cut)
        return found

    def _received(self, result: AdapterResult, client: int) -> dict[str, dict[str, Tensor]]:
        limit = self.limits[client]
        shapes = self.adapters.limited(limit).shapes()
        return {
            key: unpack_adapters(shapes[key], result.blob(key, limit), "float32") for key in shapes
        }

    # ----- averaging ------------------------------------------------------------------------------

    def _factors(self, tensors: Tensors, index: int, adapter: Adapter) -> Factors:
        block = tensors[block_key(index)]
        return Factors(block[adapter.name_b], block[adapter.name_a], adapter.scaling)

    def _weights(self, sent: Mapping[int, Tensors], averaging: Averaging) -> list[float]:
        """Return the weight of each client.

        A norm covers all matrices as one vector. If nothing was trained, all weights are equal.
        """
        if averaging.weights == "samples":
            return [float(len(self.sequences[client])) for client in sent]
        norms = []
        for tensors in sent.values():
            squares = [
                norm(self._factors(tensors, index, adapter)) ** 2
                for index, adapter in self.adapters
            ]
            norms.append(math.sqrt(math.fsum(squares)))
        return norms if any(norms) else [1.0] * len(norms)

    def _folded(
        self, sent: Mapping[int, Tensors], weights: Sequence[float], averaging: Averaging
    ) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """Yield the mean of each blob, in the server's order."""
        for index in sorted(self.adapters.blocks):
            tensors: dict[str, Tensor] = {}
            for adapter in self.adapters.blocks[index]:
                clients = [self._factors(one, index, adapter) for one in sent.values()]
                if averaging.of == "updates":
                    mean = weighted_mean(clients, weights, adapter.rank, adapter.scaling)
                else:
                    mean = zero_padded_mean(clients, weights, adapter.rank)
                tensors |= {adapter.name_a: mean.a, adapter.name_b: mean.b}
            yield block_key(index), tensors
        if self.adapters.head:
            yield (
                HEAD_KEY,
                {name: self._mean_of_head(sent, weights, name) for name in self.adapters.head},
            )

    def _mean_of_head(
        self, sent: Mapping[int, Tensors], weights: Sequence[float], name: str
    ) -> Tensor:
        mean = torch.zeros(self.adapters.head[name], dtype=torch.float64)
        total = 0.0
        for tensors, weight in zip(sent.values(), weights, strict=True):
            mean += tensors[HEAD_KEY][name].double() * weight
            total += weight
        return (mean / total).float()

    def _errors(
        self, averaged: Tensors, sent: Mapping[int, Tensors], weights: Sequence[float]
    ) -> tuple[float, float]:
        """Return the relative distance of the averaged update from the exact mean.

        The first value is for the full rank, the second for the clients' ranks.
        """
        shares = torch.tensor(weights, dtype=torch.float64) / math.fsum(weights)
        size = 0.0
        missed = dict.fromkeys({self.adapters_rank, *(self.limits[client] for client in sent)}, 0.0)
        for index, adapter in self.adapters:
            everybody = [
                factors_of(self.adapters, index, one[block_key(index)])[adapter.linear.name]
                for one in sent.values()
            ]
            exact = sum(
                share * one.scaling * one.b.double() @ one.a.double()
                for share, one in zip(shares, everybody, strict=True)
            )
            assert isinstance(exact, Tensor)
            size += float(exact.square().sum())
            mean = self._factors(averaged, index, adapter)
            for limit in missed:
                update = mean.scaling * mean.b[:, :limit].double() @ mean.a[:limit].double()
                missed[limit] += float((update - exact).square().sum())
        relative = {
            limit: math.sqrt(square / size) if size else 0.0 for limit, square in missed.items()
        }
        return relative[self.adapters_rank], math.fsum(
            relative[self.limits[client]] for client in sent
        ) / len(sent)

    # ----- tests ----------------------------------------------------------------------------------

    def score(
        self, tensors: Tensors | None, items: ScoredItems, limit: int | None = None
    ) -> dict[str, float]:
        """Return the scores of the base model with adapters, reduced to a rank limit.

        ``tensors`` None means the initial adapters, which do not change the model.
        """
        adapted = self._model_of(limit or self.adapters_rank)
        shapes = self.adapters.limited(limit or self.adapters_rank).shapes()
        given = (
            initial_adapters(self.adapters, self.settings.seed) | self._first_head
            if tensors is None
            else tensors
        )
        adapted.set(
            {
                key: {
                    name: given[key][name][tuple(map(slice, shape))]
                    for name, shape in block.items()
                }
                for key, block in shapes.items()
            }
        )
        classes = self.model.family.kind == "encoder"
        return score(adapted.whole, items, classes, TEST_BATCH, self.computing.device)


TEST_BATCH = 16
"""Number of items that are scored together; it affects scores only by rounding."""
