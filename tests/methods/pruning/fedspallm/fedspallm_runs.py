"""Federations of FedSpaLLM in several rounds, and what tests read of their runs."""

from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load

from espalier.hf.opening.opened_model import OpenedModel
from espalier.messages.records import read
from tests.bench import Bench, Home, summary
from tests.in_process import InProcessGrid
from tests.methods.promises.federations import Federations, Uninterrupted
from tests.tiny_model import save_tiny_llama


def exact(model: OpenedModel, sparsity: float) -> float:
    """Return the achieved sparsity if every matrix loses ``int(weights * sparsity)``."""
    shapes = [linear.shape for block in model.plan.blocks for linear in block.linears]
    return sum(int(rows * columns * sparsity) for rows, columns in shapes) / sum(
        rows * columns for rows, columns in shapes
    )


def pruned_layers(
    grid: InProcessGrid | Uninterrupted, server_round: int
) -> dict[int, dict[str, dict[str, torch.Tensor]]]:
    """Return the tensors that each client sent in a round: client -> blob key -> tensors."""
    found: dict[int, dict[str, dict[str, torch.Tensor]]] = {}
    for _, reply in grid.received:
        body = read(reply.content)
        if body.header.kind in ("train", "fetch") and body.header.server_round == server_round:
            found.setdefault(body.header.client, {}).update(
                {key: load(blob) for key, blob in body.blobs.items()}
            )
    return found


def sampled(folder: Path) -> dict[int, list[int]]:
    """Return each client's layers in the last round."""
    return {client["client"]: client["metrics"]["layers"] for client in summary(folder)["clients"]}


SIX_LAYERS = {
    "federation.rounds": 4,
    "fedspallm.sampled-layers": 0.33,
    "evaluation.local-baseline": True,
}
"""Settings of four rounds on a model of six layers.

A client samples one or two layers per round and gets all layers at the end.
"""


class SpaLLMRounds(Federations):
    """Two rounds with rising sparsity.

    Clients of capability 1, 2, 2, 2 sample one layer or both.
    """

    method = "fedspallm"
    settings: ClassVar[dict[str, Any]] = {
        "federation.rounds": 2,
        "fedspallm.schedule": "linear",
        "pruning.sparsity": 0.5,
        "fedspallm.capabilities": "1,2",
    }
    last_round = 1
    result_round = 3

    def expected_sparsity(self, model: OpenedModel) -> float:
        return exact(model, 0.5)

    @pytest.fixture(scope="class")
    @classmethod
    def model_of_six(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return save_tiny_llama(tmp_path_factory.mktemp("six"), blocks=6)

    @pytest.fixture
    def six(self, bench: Bench, model_of_six: Path) -> Bench:
        """Return a bench whose model has six layers."""
        return replace(
            bench, home=Home(model_of_six, bench.public), settings=bench.settings | SIX_LAYERS
        )

    @pytest.fixture(scope="class")
    @classmethod
    def whole_six(
        cls, model_of_six: Path, home: Home, tmp_path_factory: pytest.TempPathFactory
    ) -> Uninterrupted:
        """Execute one undisturbed run on six layers."""
        return cls._uninterrupted(
            tmp_path_factory.mktemp("whole-six"), Home(model_of_six, home.public), SIX_LAYERS
        )
