"""Toy method: three short files keep the promises of every method, in two rounds."""

from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file

from espalier.messages.records import read
from espalier.messages.tensor_blobs import views
from tests.methods.promises.federations import Uninterrupted
from tests.methods.promises.promises import Promises


@pytest.mark.usefixtures("toy")
class TestToyMethod(Promises):
    method = "toy"
    settings: ClassVar[dict[str, Any]] = {"toy.strength": 0.5}
    last_round = 2
    cuts_samples = "calibration_samples"

    def test_the_average_by_hand(self, plain: Uninterrupted) -> None:
        """A query matrix is the dense one with columns scaled by the mean of the sent vectors."""
        replies = [read(reply.content) for _, reply in plain.received]
        vectors = [views(reply.blobs["vector"])["mean"] for reply in replies if reply.blobs]
        made, dense = (
            load_file(folder / "model.safetensors")["model.layers.0.self_attn.q_proj.weight"]
            for folder in (plain.folder / "model", plain.bench.model)
        )
        expected = dense * torch.from_numpy(1 + 0.5 * sum(vectors) / len(vectors))
        torch.testing.assert_close(made.float(), expected, rtol=1e-2, atol=1e-6)
