"""Contracts of the toy: one vector up, nothing down but an order; the result for evaluation on own text."""

from typing import Any

import numpy as np

from espalier.settings.mistakes import Mistake
from espalier.settings.run import RunSettings
from espalier.wire.contract import BlockSpecs, Contract
from espalier.wire.messages import Kind, Letter, NoScalars
from espalier.wire.parts import (
    Delivery,
    PartRequest,
    Reply,
    Report,
    parts_of,
    require_result_wanted,
)
from espalier.wire.payload import TensorSpec, unpack_tensors
from espalier.wire.plan import ModelPlan, PlanOf


def vector(plan: ModelPlan) -> BlockSpecs:
    """The one blob: a number for each column of the first matrix, the width of the model."""
    return {"vector": {"mean": TensorSpec("F32", (plan.blocks[0].linears[0].shape[1],))}}


def finite(key: str, blob: bytes) -> None:
    """An embedding's mean is a small number."""
    if not np.all(np.abs(unpack_tensors(blob)["mean"]) < 100):
        raise Mistake(f"{key}: a number is not below 100")


def contract(request: Letter, plan_of: PlanOf, run: RunSettings) -> Contract:
    """Of ``train`` and ``fetch``."""
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
    """Of the average, brought to clients for ``evaluation.own-text``."""
    require_result_wanted(run)
    average = Delivery(
        NoScalars, vector(plan_of()), [["vector"]], "that the average arrived, nothing else", finite
    )
    return average.contract(request, run.method)


EXAMPLES: dict[Kind, dict[str, Any]] = {}
