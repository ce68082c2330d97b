"""Federations of HetLoRA, and what tests read of their runs."""

from typing import Any, ClassVar

from flwr.app import Message

from espalier.messages.records import read
from tests.methods.promises.federations import Federations

SIDES = 16 + 16 + 16 + 8
"""Inputs and outputs of the adapted matrices of one block; the bench's model has two blocks."""
PRUNED = {
    "hetlora__regularisation": 1.0,
    "federation__rounds": 3,
    "training__steps": 5,
    "training__schedule": "linear",
}
"""Settings with a strong penalty and small steps.

Every client gives up half of its ranks in round 2.
"""


def limits(requests: list[Message], server_round: int, kind: str = "train") -> dict[int, int]:
    """Return the rank limit of each client's orders in a round."""
    asked = [read(request.content) for request in requests]
    chosen = [
        body
        for body in asked
        if (body.header.kind, body.header.server_round) == (kind, server_round)
    ]
    return {body.header.client: body.fields["rank_limit"] for body in chosen}


class HetLoRARuns(Federations):
    """Federations with two rounds of a few steps on two matrices of each block.

    The clients have ranks 2, 4, 8 and 8.
    """

    method = "hetlora"
    settings: ClassVar[dict[str, Any]] = {
        "federation.rounds": 2,
        "lora.ranks": "2,4,8",
        "hetlora.gamma": 0.5,
        "training.steps": 2,
        "training.batch-size": 2,
        "training.learning-rate": 0.01,
        "lora.rank": 8,
        "lora.alpha": 16.0,
        "lora.merge": True,
    }
    last_round = 1
    result_round = 3
    cuts_samples = "all_samples"
