"""Federations of FedSODA, and what tests read of their runs."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from flwr.app import Message

from espalier.messages.message import MessageBody
from espalier.messages.records import read
from espalier.messages.tensor_blobs import pack_tensors, unpack_tensors
from tests.bench import Home, private_text
from tests.methods.promises.federations import Federations, Uninterrupted
from tests.tiny_model import save_tiny_llama

SMALL: dict[str, Any] = {
    "federation.rounds": 2,
    "training.steps": 2,
    "training.batch-size": 2,
    "training.learning-rate": 0.01,
    "training.proximal": 0.01,
    "lora.rank": 2,
    "lora.alpha": 4.0,
    "lora.targets": "attn.q,attn.v,mlp.down",
    "lora.merge": True,
    "fedsoda.adapter-layers": 1,
    "fedsoda.group-layers": 1,
    "fedsoda.groups": 1,
    "fedsoda.pre-align-steps": 3,
    "fedsoda.realign-steps": 2,
    "fedsoda.realign-every": 2,
    "public.samples": 4,
    "part-bytes": 65536,
}
BLOCKS = 4


def asked(requests: list[Message], what: str) -> list[MessageBody]:
    """Return the requests of one kind; kinds of ``push`` have names of their own."""
    bodies = [read(request.content) for request in requests]
    return [body for body in bodies if body.fields.get("what", body.header.kind) == what]


class FedSodaRuns(Federations):
    """Federations with two rounds on a model of four blocks.

    One block is dropped, and the last block is the adapter. The server aligns before both rounds.
    """

    method = "fedsoda"
    planned_exactly = True
    settings: ClassVar[dict[str, Any]] = SMALL
    last_round = 1
    result_round = 3
    cuts_samples = "all_samples"

    @pytest.fixture(scope="class")
    @classmethod
    def home(cls, tmp_path_factory: pytest.TempPathFactory) -> Home:
        """Create a deeper model that is wide enough for NF4, and two texts.

        One text is for the alignment, the other for the evaluation.
        """
        folder = tmp_path_factory.mktemp("home")
        model = save_tiny_llama(folder / "base", blocks=BLOCKS, hidden=64, feed_forward=64, std=0.1)
        (folder / "public.txt").write_text("\n\n".join(private_text(99).split("\n\n")[:15]))
        (folder / "align.txt").write_text("\n\n".join(private_text(98).split("\n\n")[:15]))
        cls.settings = {**SMALL, "public.text": str(folder / "align.txt")}
        return Home(model, folder / "public.txt")

    def model_of_clients(self, run: Uninterrupted) -> Path:
        """Return the directory of the sub-model."""
        return run.folder / "sub-model"


def _zeros(blobs: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the same tensors filled with zeros."""
    return {
        key: pack_tensors(
            {name: np.zeros_like(value) for name, value in unpack_tensors(blob).items()}
        )
        for key, blob in blobs.items()
    }
