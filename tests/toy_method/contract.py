"""Toy: its settings, the vector that clients send, and the edit of weights by a vector."""

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field

from espalier.messages.parts import Reply, contracts_of, values_within
from espalier.messages.tensor_blobs import TensorSpec, unpack_tensors
from espalier.models.plan import ModelPlan
from espalier.settings.method import MethodSettings
from espalier.settings.registry import Row
from espalier.settings.run import RunSettings


class ToySettings(MethodSettings):
    """Table ``[toy]``."""

    FEDERATION: ClassVar[tuple[str, ...]] = ("rounds",)
    ROUNDS = 2

    strength: float = Field(0.1, gt=0, le=1, description="How far the vector moves the model.")


def reply(plan: ModelPlan, run: RunSettings) -> Reply:
    """Describe a client's reply: one number per column of a query matrix."""
    mean = TensorSpec("F32", (plan.blocks[0].linears[0].shape[1],))
    learns = "the mean embedding of this client's samples"
    return Reply({"vector": {"mean": mean}}, learns, check_values=values_within(100))


contract, push_contract = contracts_of(reply)


def scaled(weight: Any, _: int, blobs: Mapping[str, bytes], run: RunSettings) -> Any:
    """Scale the columns of a query matrix (torch) by ``1 + strength * mean``, in float32."""
    factor = 1 + run.of(ToySettings).strength * unpack_tensors(blobs["vector"])["mean"]
    wide = weight.float()
    return (wide * wide.new_tensor(factor)).to(weight.dtype)


EDITS = {"attn.q": scaled}

METHOD = Row(
    "Toy (mean of vectors)", ToySettings, "tests.toy_method.strategy:Toy", "tests.toy_method.client"
)
