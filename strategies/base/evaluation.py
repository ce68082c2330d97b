"""Evaluation by the clients, for all methods.

Clients evaluate their own result on evaluation texts, and several models on their own held-out
text.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from flwr.app import Message

from espalier.data.tasks.scored_items import ScoredItems, to_arrays
from espalier.messages.evaluation import TEST_BLOB, WINDOWS_BLOB, Texts, require_many
from espalier.messages.message import read
from espalier.messages.payload import pack_tensors
from espalier.settings.run import RunSettings
from strategies.base.rounds import Rounds
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

    Parameters
    ----------
    run : run whose ``evaluation`` settings apply
    public_text : evaluation texts by name, shape (windows, tokens), int64; may be empty
    tests : public test items and the metrics for them, or None

    Raises
    ------
    InputError
        There are so few tokens or items that real sites would refuse to evaluate on them.
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

    def requests(self, rounds: Rounds, server_round: int) -> list[Message]:
        """Return one request per active client, with the evaluation texts and test items."""
        if not self.asked:
            return []
        return [
            rounds.request("evaluate", seat, server_round, self._texts, self._blobs)
            for seat in rounds.roster.active()
        ]

    def _packed(self) -> tuple[Texts, dict[str, bytes]]:
        """Return the request's fields, and the blobs with evaluation texts and test items."""
        windows = {
            name: windows.numpy().astype(np.int32) for name, windows in self.public_text.items()
        }
        numbers = {name: len(array) for name, array in windows.items()}
        blobs = {WINDOWS_BLOB: pack_tensors(windows)} if windows else {}
        if self.tests is not None:
            blobs[TEST_BLOB] = pack_tensors(to_arrays(self.tests[0]))
        return asked_texts(self.run.settings, numbers, self.tests), blobs

    def collect(self, rounds: Rounds, replies: Iterable[Message]) -> None:
        """Record the clients' results as they arrive."""
        self.run.progress.begin("local only", len(rounds.roster.active()) if self.asked else 0)
        for reply in replies:
            letter = read(reply.content)
            seat = rounds.roster.seats[letter.header.client]
            seat.seconds += letter.scalars["seconds"]
            for found, name in (
                (self.figures.losses, "losses"),
                (self.figures.own_losses, "own_losses"),
                (self.figures.test_scores, "test_scores"),
            ):
                if letter.scalars[name]:
                    found[seat.client] = list(letter.scalars[name])
            self.run.progress.step("local_only", f"local result of {seat.site}", client=seat.client)


def asked_texts(
    settings: RunSettings,
    num_windows: Mapping[str, int],
    tests: tuple[ScoredItems, Sequence[str]] | None,
) -> Texts:
    """Return the fields of the request.

    Parameters
    ----------
    num_windows : number of windows of each evaluation text
    tests : public test items and the metrics for them, or None
    """
    texts = Texts(
        names=list(num_windows),
        num_windows=list(num_windows.values()),
        window_tokens=settings.evaluation.window_tokens,
        own_text=settings.evaluation.own_text,
    )
    if tests is not None:
        items, metrics = tests
        texts.test_metrics = list(metrics)
        texts.test_items = len(items)
        texts.test_requests = len(items.requests)
        texts.test_tokens = len(to_arrays(items)["tokens"])
    return texts
