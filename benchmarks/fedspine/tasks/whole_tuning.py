"""Baselines of the paper's figures 1 and 2a: federated averaging of all weights, or of the head.

No method of the app sends a model's own weights, so the federation is implemented here, with the
app's sequences, training loop and head. In each round every client trains the global values for the
same number of steps, and the mean weighted by samples starts the next round.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from espalier.evaluation.scores import score
from espalier.hf.machine.computing import Computing
from espalier.hf.opening.opened_model import open_model
from espalier.hf.whole.full_tensors import trained_whole
from espalier.hf.whole.model import load_whole
from espalier.methods.tuning.adapters.tensors import trained
from espalier.models.adapters import HEAD_KEY
from espalier.seeds import derive_seed
from espalier.settings.node import simulated_node
from espalier.settings.run import RunSettings
from espalier.training.initial_values import HEAD_SEED
from espalier.training.loop import Loop
from espalier.training.sequences import client_sequences
from server_app.public_tests import public_tests
from strategies.fleet import (
    fleet_of,
    sending_seconds,
    training_operations,
)


@dataclass(frozen=True)
class Look:
    """Evaluation of the global model after a round."""

    round: int
    score: float
    seconds: float
    """Seconds of all rounds so far, by the virtual clock."""
    waiting: float
    """Mean waiting time of the rounds, in seconds."""
    bytes_up: int
    """Bytes sent by one client in all rounds so far; it receives one round less."""
    bytes_down: int


def looks(
    settings: RunSettings, fleet_name: str, *, only_head: bool, metric: str
) -> Iterator[Look]:
    """Yield evaluations of a federation that trains all weights, or only the head.

    There is one every ``evaluation.every`` rounds.
    """
    federation = _Federation(settings, only_head)
    training = settings.training
    fleet = fleet_of(fleet_name)
    number = federation.num_trained
    assert fleet is not None
    tokens = training.batch_size * settings.task.max_tokens
    # With only the head trained, the backward pass stops at it, so frozen weights cost half.
    frozen = federation.num_frozen // 2 if only_head else federation.num_frozen
    seconds = 0.0
    waiting = 0.0
    up = 0
    for server_round in range(1, settings.federation.rounds + 1):
        federation.train(server_round)
        sent = 4 * number
        times = []
        for client in federation.sequences:
            conditions = fleet.drawn(settings.seed, client, server_round)
            operations = training_operations(training.steps * tokens, frozen, number)
            computing = operations / conditions.operations_per_second
            times.append(
                computing + sending_seconds(sent if server_round == 1 else 2 * sent, conditions)
            )
        slowest = max(times)
        seconds = seconds + slowest
        waiting = waiting + fmean(slowest - time for time in times)
        up = up + sent
        if server_round % settings.evaluation.every == 0:
            found = federation.score()[metric]
            yield Look(server_round, found, seconds, waiting / server_round, up, up - sent)


class _Federation:
    """Clients of the run, and the global values."""

    def __init__(self, settings: RunSettings, only_head: bool) -> None:
        self.settings = settings
        self.computing = Computing(torch.device("cpu"), torch.float32, settings.threads)
        model = open_model(settings.model)
        self.tests = public_tests(settings, model)
        torch.set_num_threads(settings.threads)
        self.sequences = {
            client: client_sequences(settings, simulated_node(), model, client)
            for client in range(settings.num_clients)
        }
        seed = derive_seed(settings.seed, HEAD_SEED)
        classes = self.tests.num_classes or None
        self.whole: Any = load_whole(
            model, self.computing, "float32", num_labels=classes, seed=seed
        )
        every: Mapping[str, nn.Parameter] = dict(self.whole.named_parameters())
        head = trained_whole(model, self.whole, trained(model.plan, settings).whole).get(
            HEAD_KEY, {}
        )
        of_head = {id(value) for value in head.values()}
        self.parameters = {
            name: value for name, value in every.items() if not only_head or id(value) in of_head
        }
        for name, value in every.items():
            value.requires_grad_(name in self.parameters)
        self.values = self._current()

    @property
    def num_trained(self) -> int:
        """Number of parameters that are trained and sent."""
        return sum(value.numel() for value in self.parameters.values())

    @property
    def num_frozen(self) -> int:
        """Number of frozen parameters."""
        return sum(value.numel() for value in self.whole.parameters()) - self.num_trained

    def train(self, server_round: int) -> None:
        """Run one round of all clients, and average their values."""
        settings = self.settings
        total = sum(len(own) for own in self.sequences.values())
        steps = settings.training.steps
        mean = {name: torch.zeros_like(value) for name, value in self.values.items()}
        for client, sequences in self.sequences.items():
            self._set(self.values)
            seed = derive_seed(settings.seed, "training", client=client)
            all_steps = settings.federation.rounds * steps
            loop = Loop(
                self.whole,
                self.parameters,
                settings.training,
                len(sequences),
                sequences.batch,
                seed,
                all_steps,
            )
            loop.run((server_round - 1) * steps, steps)
            for name, value in self.parameters.items():
                mean[name].add_(value.detach(), alpha=len(sequences) / total)
        self.values = mean
        self._set(mean)

    def score(self) -> dict[str, float]:
        """Return the scores of the global model on the task's items."""
        assert self.tests.encoded is not None
        classes = self.tests.num_classes > 0
        batch = self.settings.training.batch_size
        return score(self.whole, self.tests.encoded, classes, batch, self.computing.device)

    def _current(self) -> dict[str, Tensor]:
        return {name: value.detach().clone() for name, value in self.parameters.items()}

    @torch.no_grad()
    def _set(self, values: Mapping[str, Tensor]) -> None:
        for name, value in self.parameters.items():
            value.copy_(values[name])
