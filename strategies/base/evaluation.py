"""Evaluation by the clients, for all methods.

Clients evaluate their own result on evaluation texts, and several models on their own held-out
text.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import numpy as np
import torch

from espalier.amounts import count, figure
from espalier.data.tasks.scored_items import ScoredItems, to_arrays
from espalier.messages.evaluation import SAMPLES_BLOB, TEST_BLOB, Texts, require_many
from espalier.messages.message import MessageBody
from espalier.messages.tensor_blobs import pack_tensors
from espalier.settings.run import RunSettings
from strategies.base.rounds import Request, Rounds
from strategies.base.run import Run


@dataclass
class ClientFigures:
    """Results of the clients' evaluation; clients that were not asked or failed are missing."""

    losses: dict[int, list[float]] = field(default_factory=dict)
    """Mean loss in nats of the client's own result per evaluation text, in text order."""
    own_losses: dict[int, list[float]] = field(default_factory=dict)
    """Mean loss in nats of each of ``OWN_TEXT_MODELS`` on the client's own held-out text."""
    test_scores: dict[int, list[float]] = field(default_factory=dict)
    """Scores of the client's own result on public test items, in the order of the metrics."""

    def clients(self) -> set[int]:
        """Return the clients that have at least one result."""
        return self.losses.keys() | self.own_losses.keys() | self.test_scores.keys()


class ClientEvaluation:
    """Requests for the clients' evaluation, and the results that they return.

    ``public_text`` has the evaluation texts by name, shape (samples, tokens), int64; it may be
    empty. ``tests`` has public test items and the metrics for them, or is None. Raises InputError
    if there are so few tokens or items that real sites would refuse to evaluate on them.
    """

    def __init__(
        self,
        run: Run,
        public_text: Mapping[str, torch.Tensor],
        tests: tuple[ScoredItems, Sequence[str]] | None = None,
    ) -> None:
        self.run = run
        self.public_text = public_text
        self.tests = tests
        self.asked = bool(public_text) or tests is not None or run.settings.evaluation.own_text
        self.figures = ClientFigures()
        """Results of the clients; filled by ``collect``."""
        self._texts, self._blobs = self._packed()
        if not run.simulation:
            require_many(self._texts)

    def requests(self, rounds: Rounds, server_round: int) -> list[Request]:
        """Return one request per active client, with the evaluation texts and test items."""
        if not self.asked:
            return []
        return [
            rounds.request("evaluate", seat.client, server_round, self._texts, self._blobs)
            for seat in rounds.roster.active()
        ]

    def _packed(self) -> tuple[Texts, dict[str, bytes]]:
        """Return the request's fields, and the blobs with evaluation texts and test items."""
        # Token ids fit int32; half the bytes of int64.
        samples = {
            name: samples.numpy().astype(np.int32) for name, samples in self.public_text.items()
        }
        numbers = {name: len(array) for name, array in samples.items()}
        blobs = {SAMPLES_BLOB: pack_tensors(samples)} if samples else {}
        if self.tests is not None:
            blobs[TEST_BLOB] = pack_tensors(to_arrays(self.tests[0]))
        return asked_texts(self.run.settings, numbers, self.tests), blobs

    def collect(self, rounds: Rounds, replies: Iterable[MessageBody]) -> None:
        """Record the clients' results as they arrive."""
        expected = len(rounds.roster.active()) if self.asked else 0
        self.run.progress.begin("local scores", expected, of_clients=True)
        for body in replies:
            seat = rounds.roster.seats[body.header.client]
            # Time of the evaluation counts as work of the client.
            seat.worked_after_rounds(body.fields["seconds"])
            for name in ("losses", "own_losses", "test_scores"):
                if body.fields[name]:
                    getattr(self.figures, name)[seat.client] = list(body.fields[name])
            text = f"{seat.site}: local scores"
            self.run.progress.step("local_baseline", text, client=seat.client)


def asked_texts(
    settings: RunSettings,
    num_samples: Mapping[str, int],
    tests: tuple[ScoredItems, Sequence[str]] | None,
) -> Texts:
    """Return the fields of the request; see ``ClientEvaluation``."""
    texts = Texts(
        names=list(num_samples),
        num_samples=list(num_samples.values()),
        sequence_length=settings.evaluation.sequence_length,
        own_text=settings.evaluation.own_text,
    )
    if tests is not None:
        items, metrics = tests
        texts.test_metrics = list(metrics)
        texts.test_items = len(items)
        texts.test_requests = len(items.requests)
        texts.test_tokens = len(to_arrays(items)["tokens"])
    return texts


def in_words(measurement: Mapping[str, Any]) -> str:
    """Return the figures of an evaluation between rounds as text: ``code 80.12, f1 0.512``.

    Figures of clients with models of their own are shown as their mean.
    """
    shown = []
    for group, digits in (("perplexity", 2), ("scores", 3)):
        for name, value in (measurement.get(group) or {}).items():
            values = list(value.values()) if isinstance(value, Mapping) else [value]
            mean = None if None in values else fmean(values)
            many = f" (mean of {count(len(values), 'client')})" if len(values) > 1 else ""
            shown.append(f"{name} {figure(mean, digits)}{many}")
    return ", ".join(shown)
