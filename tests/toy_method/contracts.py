"""Contracts of the toy.

A reply contains one vector, an order contains nothing. The result is pushed for evaluation on own
text.
"""

from typing import Any

import numpy as np

from espalier.errors import InputError
from espalier.messages.contract import BlockSpecs, Contract
from espalier.messages.message import Kind, Letter, NoScalars
from espalier.messages.parts import (
    Delivery,
    PartRequest,
    Reply,
    Report,
    parts_of,
    require_result_wanted,
)
from espalier.messages.payload import TensorSpec, unpack_tensors
from espalier.models.plan import ModelPlan, PlanOf
from espalier.settings.run import RunSettings


def vector(plan: ModelPlan) -> BlockSpecs:
    """Return the specs of the only blob: one value per column of the first matrix."""
    return {"vector": {"mean": TensorSpec("F32", (plan.blocks[0].linears[0].shape[1],))}}


def finite(key: str, blob: bytes) -> None:
    """Check the vector: all magnitudes are below 100, because a mean embedding is small.

    Raises
    ------
    EspalierError
        A magnitude is 100 or more, or a value is not finite.
    """
    if not np.all(np.abs(unpack_tensors(blob)["mean"]) < 100):
        raise InputError(f"{key}: a number is not below 100")


def contract(request: Letter, plan_of: PlanOf, run: RunSettings) -> Contract:
    """Return the contract of ``train`` and ``fetch``."""
    specs = vector(plan_of())
    reply = Reply(
        order=NoScalars,
        part_order=PartRequest,
        report=Report,
        specs=specs,
        parts=parts_of(specs, run.part_bytes),
        observer="the mean embedding of this client's windows",
        more="never sent",
        check_values=finite,
    )
    return reply.contract(request, run.method)


def delivery(request: Letter, plan_of: PlanOf, run: RunSettings) -> Contract:
    """Return the contract of the average, which is pushed for ``evaluation.own-text``."""
    require_result_wanted(run)
    average = Delivery(
        NoScalars, vector(plan_of()), [["vector"]], "that the average arrived, nothing else", finite
    )
    return average.contract(request, run.method)


EXAMPLES: dict[Kind, dict[str, Any]] = {}
