"""Promises of methods that leave each client its own model.

The client's metrics are those of its own model, and the model stays at the client.
"""

import math
from abc import abstractmethod
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from espalier.messages.records import read
from tests.bench import Bench, Home, private_text, summary
from tests.methods.promises.federations import ALL_FIGURES, Uninterrupted
from tests.methods.promises.promises import Promises, held_out


def perplexity_of(model: Any, samples: torch.Tensor) -> float:
    """Return the perplexity from the losses that transformers computes."""
    with torch.no_grad():
        losses = [
            model(input_ids=sample[None], labels=sample[None]).loss.item() for sample in samples
        ]
    return math.exp(sum(losses) / len(losses))


def samples_of(bench: Bench, text: str) -> torch.Tensor:
    """Return a text's tokens in sequences of 16, shape (sequences, 16)."""
    tokens = torch.tensor(AutoTokenizer.from_pretrained(bench.model)(text)["input_ids"])
    return tokens[: len(tokens) // 16 * 16].view(-1, 16)


class PersonalPromises(Promises):
    """Promises that replace those of methods with one global model."""

    in_kept_run: ClassVar[dict[str, Any]] = {}
    """Settings of the run that keeps its private state."""

    @abstractmethod
    def masked_model(self, run: Uninterrupted, client: int) -> torch.nn.Module:
        """Return a client's own model: transformers' full model with masked weights set to zero."""

    @pytest.fixture(scope="class")
    @classmethod
    def kept(cls, home: Home, tmp_path_factory: pytest.TempPathFactory) -> Uninterrupted:
        """Run with all metrics and keep the clients' state directories."""
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr("server_app.app._remove_private_state", lambda run: None)
            return cls._uninterrupted(
                tmp_path_factory.mktemp("kept"), home, ALL_FIGURES | cls.in_kept_run
            )

    def test_nothing_is_pushed_without_own_text(self, bench: Bench) -> None:
        """The server pushes the result only if the clients evaluate on the evaluation text.

        Each client derives its own model from the result.
        """

        def pushed(**changes: Any) -> list[int]:
            grid = bench.grid(**changes)
            bench.run(grid, **changes)
            replies = [read(reply.content) for _, reply in grid.received]
            assert all(
                reply.fields["own_losses"] == []
                for reply in replies
                if reply.header.kind == "evaluate"
            )
            return [reply.header.server_round for reply in replies if reply.header.kind == "push"]

        assert self.result_round in pushed(evaluation__local_baseline=True)
        assert self.result_round not in pushed()

    def test_exported_model_has_reported_perplexity(self, kept: Uninterrupted) -> None:
        """Each client's metric is that of its own model."""
        samples = samples_of(kept.bench, kept.bench.public.read_text())
        found = [
            perplexity_of(self.masked_model(kept, client), samples)
            for client in range(kept.bench.num_clients)
        ]
        told = [
            client["metrics"]["perplexity/public/federated"]
            for client in summary(kept.folder)["clients"]
        ]
        assert told == pytest.approx(found, rel=1e-3)
        metric, _ = summary(kept.folder)["metrics"]
        assert metric["values"]["federated"] == pytest.approx(np.mean(found), rel=1e-3)

    def test_own_text_figures_equal_transformers(self, kept: Uninterrupted) -> None:
        for client, document in enumerate(summary(kept.folder)["clients"]):
            passages = [
                passage for passage in private_text(client).split("\n\n") if held_out(passage)
            ]
            expected = perplexity_of(
                self.masked_model(kept, client), samples_of(kept.bench, "\n\n".join(passages))
            )
            assert document["metrics"]["perplexity/own-text/federated"] == pytest.approx(
                expected, rel=1e-3
            )
