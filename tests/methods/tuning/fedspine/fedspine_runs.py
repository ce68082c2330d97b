"""Federations of FedSpine, and what tests read of their runs."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from flwr.app import Message

from espalier.messages.blobs.cut_bits import CUT_BITS
from espalier.messages.message import MessageBody
from espalier.messages.records import read, write
from espalier.messages.tensor_blobs import pack_tensors, unpack_tensors
from espalier.models.structure import Structure
from tests.methods.promises.federations import Federations

GROUP = 384
CHANNEL = 48
"""Parameters of a prunable group of the bench's model.

The model has two blocks with 2 attention groups and 24 channels each; its hidden size is 16.
"""
UNITS = 2 * (2 + 24)
PATHS = {
    "attn.q": "self_attn.q_proj", "attn.k": "self_attn.k_proj", "attn.v": "self_attn.v_proj",
    "attn.o": "self_attn.o_proj", "mlp.gate": "mlp.gate_proj", "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}  # fmt: skip


class FedSpineRuns(Federations):
    """Federations with two rounds of a few steps.

    Round 1 tunes the whole model, round 2 prunes 25%.
    """

    method = "fedspine"
    settings: ClassVar[dict[str, Any]] = {
        "federation.rounds": 2,
        "pruning.ratio": 0.25,
        "pruning.keep-models": False,
        "training.steps": 3,
        "training.batch-size": 2,
        "training.learning-rate": 0.01,
        "lora.rank": 4,
        "lora.alpha": 8.0,
        "lora.targets": "all",
    }
    last_round = 1
    result_round = 3
    cuts_samples = "all_samples"
    in_kept_run: ClassVar[dict[str, Any]] = {"fedspine.allocation": "random"}


def opened(message: Message) -> MessageBody:
    return read(message.content)


def refinements(folder: Path) -> list[dict[str, Any]]:
    """Return the notes of every round."""
    found: list[dict[str, Any]] = json.loads((folder / "refinements.json").read_text())["rounds"]
    return found


def structures(folder: Path, client: int) -> dict[str, Any]:
    """Return the document of a device's structure."""
    found: dict[str, Any] = json.loads(
        (folder / "structures" / f"client-{client:04d}.json").read_text()
    )
    return found


def find(document: Any, key: str) -> Any:
    """Return the value of a key anywhere in a JSON document."""
    if isinstance(document, dict):
        if key in document:
            return document[key]
        return next(
            (found for value in document.values() if (found := find(value, key)) is not None), None
        )
    return None


def len_of(ranges: str) -> int:
    """Return the number of integers that ranges such as ``0-3,7`` contain."""
    ends = [part.split("-") for part in ranges.split(",")]
    return sum(int(part[-1]) - int(part[0]) + 1 for part in ends)


def in_bits(spoil: Callable[[int], int]) -> Callable[[Message, Message], Message]:
    """Return a tamper that changes the bits of a device's cut."""

    def tamper(request: Message, reply: Message) -> Message:
        body = read(reply.content)
        if body.header.kind != "push" or "structure" not in body.blobs:
            return reply
        (bits,) = unpack_tensors(body.blobs["structure"])[CUT_BITS].tolist()
        body.blobs["structure"] = pack_tensors({CUT_BITS: np.array([spoil(bits)], np.uint64)})
        return Message(write(body), reply_to=request)

    return tamper


def kept_of(folder: Path, client: int) -> list[dict[str, list[bool]]]:
    """Return which rows or columns of each block's matrices a device keeps, by matrix name."""
    structure = Structure.from_json(structures(folder, client)["structure"], "here")
    found = []
    for block in structure.blocks:
        # The model has 4 heads of width 4 in 2 groups.
        queries = [row // 8 in block.groups for row in range(16)]
        keys = [row // 4 in block.groups for row in range(8)]
        channels = [row in block.channels for row in range(24)]
        found.append(
            {"attn.q": queries, "attn.k": keys, "attn.v": keys, "attn.o": queries}
            | dict.fromkeys(("mlp.gate", "mlp.up", "mlp.down"), channels)
        )
    return found
