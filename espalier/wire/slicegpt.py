"""Contracts of SliceGPT: second moments of a client's signals at every norm, and the bases that are made of all clients'."""

from functools import partial
from typing import Any

import numpy as np
from pydantic import Field

from espalier.settings.mistakes import Mistake
from espalier.settings.run import RunSettings
from espalier.settings.slicegpt import SliceGptSettings
from espalier.wire.contract import Contract
from espalier.wire.messages import Kind, Letter, NoScalars, Scalars
from espalier.wire.parts import (
    MOST_WINDOWS,
    Delivery,
    PartRequest,
    Reply,
    Report,
    parts_of,
    require_result_wanted,
)
from espalier.wire.payload import TensorSpec, block_key, views
from espalier.wire.plan import ModelPlan, PlanOf
from espalier.wire.triangles import ROUNDING, are_inner_products, diagonal_of, triangle_size

MOMENTS = "moments"
BASIS = "basis"
"""Names of the tensor in a blob of either kind."""


class MomentsReport(Report):
    """What a client says beside its moments."""

    samples: int = Field(ge=0, le=MOST_WINDOWS)
    """Its windows, where they are its weight; else 0, which tells nothing."""


def dense_width(plan: ModelPlan) -> int:
    """The width of a decoder's residual stream."""
    return plan.blocks[0].linear("attn.q").shape[1]


def places(plan: ModelPlan) -> list[str]:
    """Where signals are looked at, in order, as names of blobs: at both norms of each block, and before the head."""
    return [
        f"{block_key(block.index)}-{part}" for block in plan.blocks for part in ("attn", "mlp")
    ] + ["head"]


def moment_specs(plan: ModelPlan, run: RunSettings) -> dict[str, dict[str, TensorSpec]]:
    """The blobs of a reply, one per place: the upper triangle of a symmetric matrix; none where clients send nothing."""
    if run.of(SliceGptSettings).covariances == "public":
        return {}
    width = dense_width(plan)
    return {place: {MOMENTS: TensorSpec("F32", (triangle_size(width),))} for place in places(plan)}


def moment_parts(plan: ModelPlan, run: RunSettings) -> list[list[str]]:
    """Which blobs of a reply travel in which part."""
    return parts_of(moment_specs(plan, run), run.part_bytes)


def basis_specs(plan: ModelPlan, run: RunSettings) -> dict[str, dict[str, TensorSpec]]:
    """The blobs that describe a sliced model, one per place."""
    width = dense_width(plan)
    kept = run.of(SliceGptSettings).width(width)
    return {place: {BASIS: TensorSpec("F32", (width, kept))} for place in places(plan)}


def possible(key: str, blob: bytes, width: int) -> None:
    """Raise Mistake if second moments are none that signals behind an RMS norm can have.

    The squares of a signal sum to the width at most, so the diagonal of a mean does; and no two lanes go together more than
    their own sizes allow.
    """
    triangle = views(blob)[MOMENTS]
    if are_inner_products(triangle, width, ROUNDING**3) and diagonal_of(
        triangle, width
    ).sum() <= width * (1 + ROUNDING):
        return
    raise Mistake(
        f"{key}: a number is not finite, or the numbers are no second moments of signals behind a"
        " norm"
    )


def contract(request: Letter, plan_of: PlanOf, run: RunSettings) -> Contract:
    """The contract of a ``train`` message (part 0) or of a ``fetch`` of a later part."""
    plan = plan_of()
    specs = moment_specs(plan, run)
    reply = Reply(
        order=NoScalars,
        part_order=PartRequest,
        report=MomentsReport,
        specs=specs,
        parts=moment_parts(plan, run),
        observer=OBSERVER if specs else OBSERVER_OF_NOTHING,
        more="the second moments at further norms, as in train",
        check_values=partial(possible, width=dense_width(plan)),
        check_report=partial(
            _require_report, tells=bool(specs) and run.federation.client_weights == "samples"
        ),
    )
    return reply.contract(request, run.method)


def _require_report(report: Scalars, tells: bool) -> None:
    if isinstance(report, MomentsReport) and (report.samples > 0) != tells:
        raise Mistake(
            "MomentsReport: samples are told where moments are, with federation.client-weights ="
            " 'samples' alone"
        )


def delivery(request: Letter, plan_of: PlanOf, run: RunSettings) -> Contract:
    """The contract of a ``deliver``: a part of the bases, on its way to a client that evaluates the sliced model."""
    require_result_wanted(run)
    specs = basis_specs(plan_of(), run)
    delivered = Delivery(
        order=NoScalars,
        specs=specs,
        parts=parts_of(specs, run.part_bytes),
        observer=(
            "that the federated result arrived, nothing else; it is sent with `evaluation.own-text`"
        ),
        check_values=_are_directions,
    )
    return delivered.contract(request, run.method)


def _are_directions(key: str, blob: bytes) -> None:
    basis = views(blob)[BASIS]
    if not (np.isfinite(basis).all() and np.square(basis).sum(axis=0).max() <= 1 + ROUNDING):
        raise Mistake(f"{key}: a number is not finite, or a direction is longer than 1")


OBSERVER = (
    "for every norm of the model, how each two lanes of the residual stream go together, as a mean"
    " over all tokens of this client's windows: in what space its hidden states lie, and with fewer"
    " tokens than lanes how many they are (the site's `least-tokens` says how many at least);"
    " before the first block it is a sum over the tokens' own embeddings, from which can be worked"
    " out how often each token occurs; who knows a few of the windows can recognise them; with"
    " `client-weights` = `samples`, how many windows it has; and how long it took"
)
OBSERVER_OF_NOTHING = "that the client takes part, nothing of its text"

EXAMPLES: dict[Kind, dict[str, Any]] = {}
"""Scalars of requests by kind: the contracts depend on none."""
