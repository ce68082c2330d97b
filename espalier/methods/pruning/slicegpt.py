"""SliceGPT: settings and contracts.

Clients send second moments of their signals at every norm. The principal components of the residual
stream are kept.

The server computes the bases from the moments of all clients.
"""

import math
from collections.abc import Mapping
from functools import partial
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from espalier.errors import InputError, ProtocolError
from espalier.messages.contract import Contract
from espalier.messages.message import MessageBody
from espalier.messages.parts import (
    MAX_SAMPLES,
    Push,
    Reply,
    Report,
    reports_samples,
    require_result_wanted,
)
from espalier.messages.sums.summands import SumSpec, SumSpecs
from espalier.messages.sums.summed_weights import most_weight, weight_specs
from espalier.messages.tensor_blobs import TensorSpec, views
from espalier.models.plan import ModelPlan, PlanOf, block_key
from espalier.models.triangles import ROUNDING, are_inner_products, diagonal_of, triangle_size
from espalier.settings.method import PublicTextSettings
from espalier.settings.registry import Row
from espalier.settings.run import RunSettings
from espalier.settings.table import ReadWith
from espalier.settings.tables.federation import FederationSettings
from pruning_kernels.bounded_fixed_point import Scale, fraction_that_fits, signed_bits


class SliceGptSettings(PublicTextSettings):
    """Table ``[slicegpt]`` (Ashkboos et al. 2024, section 3)."""

    FEDERATION: ClassVar[tuple[str, ...]] = (
        "client-weights",
        "max-weight-ratio",
        "aggregation-rule",
        "max-update-ratio",
        "secure-sum",
    )
    RULES: ClassVar[tuple[str, ...]] = ("clipped-mean", "mean")
    WHY_NO_OTHER_RULE = (
        "second moments form a positive semidefinite matrix, and a median of each number does not,"
        " so they are limited in every direction instead"
    )
    WEIGHTS: ClassVar[tuple[str, ...]] = ("samples", "equal")
    MAKES_LOCAL_BASELINE_WITH: ClassVar[Mapping[str, str | tuple[str, ...]]] = {
        "slicegpt.covariances": "public"
    }

    READ_WITH: ClassVar[ReadWith] = {
        f"public.{key}": {"covariances": ("public",)} for key in ("text", "samples")
    }

    width_pruning_ratio: float = Field(
        0.2,
        ge=0,
        lt=1,
        description=(
            "Fraction of the residual stream's width that is removed. The number of parameters"
            " decreases by less, because each block gets two matrices that map one basis to the"
            " next: in a model with the shape of LLaMA-2-7B by 10% with 0.2, 16% with 0.25 and 22%"
            " with 0.3. A model whose head shares the embedding's weights gets a head of its own. 0"
            " rotates and removes nothing."
        ),
    )
    multiple: int = Field(
        8,
        ge=1,
        description=(
            "The width that stays is a multiple of this number, so slightly more is removed. With"
            " 64 the sliced model can be loaded in NF4, for instance to tune it with"
            " `training.base=nf4`."
        ),
    )
    covariances: Literal["clients", "public"] = Field(
        "clients",
        description=(
            "Signals that determine the minor components: the clients', pooled, or those of a"
            " public text (`public.text`) at the server, for which clients send nothing."
        ),
    )

    @property
    def has_local_baseline(self) -> bool:
        """True if moments come from public text: the round then leaves no local baseline."""
        return self.covariances == "public"

    def secure_sum_fault(self, federation: FederationSettings) -> str:
        """Return which settings need single replies; empty if none do."""
        if self.covariances == "public":
            return (
                "slicegpt.covariances = 'public': clients send nothing that could be summed; set it"
                " to 'clients'"
            )
        return ""

    def width(self, dense: int) -> int:
        """Return the width of the residual stream after slicing.

        Raises InputError if no dimension would be left.
        """
        # The small constant absorbs rounding errors of the product.
        kept = math.floor((1 - self.width_pruning_ratio) * dense + 1e-9)
        kept -= kept % self.multiple
        if kept < 1:
            raise InputError(
                f"slicegpt.width-pruning-ratio = {self.width_pruning_ratio}: of a residual stream"
                f" of width {dense} no multiple of {self.multiple} would stay; lower it, or"
                " slicegpt.multiple"
            )
        return kept


MAX_FRACTION_BITS = 32
"""Maximum number of bits after the point of a moment as a summand."""
MOMENTS = "moments"
"""Name of the tensor in a blob of moments."""
BASIS = "basis"
"""Name of the tensor in a blob of a basis."""


class MomentsReport(Report):
    """Fields of a reply with moments."""

    samples: int = Field(ge=0, le=MAX_SAMPLES)
    """Number of calibration samples if it is the client's weight in the mean; else 0."""


def dense_width(plan: ModelPlan) -> int:
    """Return the number of residual dimensions of a decoder."""
    return plan.blocks[0].linear("attn.o").shape[0]


def places(plan: ModelPlan) -> list[str]:
    """Return the blob keys of the measured signals, in order.

    Signals are measured at both norms of each block and before the head.
    """
    return [
        f"{block_key(block.index)}-{part}" for block in plan.blocks for part in ("attn", "mlp")
    ] + ["head"]


def moment_specs(plan: ModelPlan, run: RunSettings) -> dict[str, dict[str, TensorSpec]]:
    """Return the specs of the blobs of a reply, one per place; none if clients send no moments.

    Each has the upper triangle of a symmetric matrix.
    """
    if run.of(SliceGptSettings).covariances == "public":
        return {}
    width = dense_width(plan)
    return {place: {MOMENTS: TensorSpec("F32", (triangle_size(width),))} for place in places(plan)}


def moment_scale(plan: ModelPlan, run: RunSettings) -> Scale:
    """Return the fixed point of second moments, none of which exceeds the width."""
    # No moment exceeds the width (see ``possible``), so none exceeds 2^exponent.
    exponent = (dense_width(plan) - 1).bit_length()
    max_weight = most_weight(run)
    return Scale(
        exponent, fraction_that_fits(exponent, run.num_clients, max_weight, MAX_FRACTION_BITS)
    )


def summands(server_round: int, plan: ModelPlan, run: RunSettings) -> SumSpecs:
    """Return the specs of the weighted moments as summands, and of the weight."""
    scale = moment_scale(plan, run)
    bits = signed_bits(scale.exponent + scale.fraction_bits, run.num_clients, most_weight(run))
    spec = SumSpec(triangle_size(dense_width(plan)), bits)
    return {**{place: {MOMENTS: spec} for place in places(plan)}, **weight_specs(run)}


def basis_specs(plan: ModelPlan, run: RunSettings) -> dict[str, dict[str, TensorSpec]]:
    """Return the specs of the blobs that describe a sliced model, one per place.

    A basis has the shape (width, kept width).
    """
    width = dense_width(plan)
    # Columns of a basis are the directions that the sliced model keeps.
    kept = run.of(SliceGptSettings).width(width)
    return {place: {BASIS: TensorSpec("F32", (width, kept))} for place in places(plan)}


def possible(key: str, blob: bytes, width: int) -> None:
    """Check that second moments can come from signals after an RMS norm.

    The squares of a signal sum to at most the width, and so does the diagonal of their mean. An
    entry for two dimensions cannot exceed the geometric mean of their diagonal entries. Raises
    ProtocolError if the check fails, or if a number is not finite.
    """
    triangle = views(blob)[MOMENTS]
    if are_inner_products(triangle, width, ROUNDING**3) and diagonal_of(
        triangle, width
    ).sum() <= width * (1 + ROUNDING):
        return
    raise ProtocolError(
        f"{key}: a number is not finite, or the numbers are not second moments of signals behind a"
        " norm"
    )


def contract(request: MessageBody, plan_of: PlanOf, run: RunSettings) -> Contract:
    """Return the contract of a ``train`` message (part 0), or of a ``fetch`` of a later part."""
    plan = plan_of()
    specs = moment_specs(plan, run)
    has_samples = bool(specs) and reports_samples(run)

    def check_report(report: MomentsReport) -> None:
        if (report.samples > 0) != has_samples:
            raise ProtocolError(
                "MomentsReport: samples are sent with moments, only with"
                " federation.client-weights = 'samples'"
            )

    reply = Reply(
        report=MomentsReport,
        specs=specs,
        observer=OBSERVER if specs else OBSERVER_OF_NOTHING,
        more="The second moments at further norms, as in train.",
        check_values=partial(possible, width=dense_width(plan)),
        check_report=check_report,
    )
    return reply.contract(request, run)


def push_contract(request: MessageBody, plan_of: PlanOf, run: RunSettings) -> Contract:
    """Return the contract of a ``push`` with a part of the bases for evaluation."""
    require_result_wanted(run)
    bases = Push(specs=basis_specs(plan_of(), run), check_values=_are_directions)
    return bases.contract(request, run)


def _are_directions(key: str, blob: bytes) -> None:
    basis = views(blob)[BASIS]
    if not (np.isfinite(basis).all() and np.square(basis).sum(axis=0).max() <= 1 + ROUNDING):
        raise ProtocolError(f"{key}: a number is not finite, or a direction is longer than 1")


OBSERVER = (
    "For every norm of the model: the second moments of the residual dimensions, as a mean over all"
    " tokens of this client's samples. They describe the space in which its hidden states lie; with"
    " fewer tokens than dimensions they also tell the number of tokens (the site's `min-tokens`"
    " sets the minimum). Before the first block they are a sum over the tokens' own embeddings,"
    " from which somebody can compute how often each token occurs. A reader who knows some of the"
    " samples can recognise them in the reply, whatever `min-tokens` says. With `client-weights`"
    " = `samples`: the number of calibration samples. Also how long the work took."
)
OBSERVER_OF_NOTHING = "That the client takes part, and nothing of its text."


METHOD = Row(
    title=(
        "SliceGPT (principal components of the residual stream, by pooled second moments, of"
        " which the minor go)"
    ),
    settings=SliceGptSettings,
    strategy="strategies.pruning.slicegpt:SliceGpt",
    job="client_app.methods.pruning.slicegpt",
    summands=summands,
    to_summands="client_app.summands.statistics:of_moments",
    dry_run="server_app.estimate.messages.pruning:DrySliceGpt",
    work="server_app.estimate.work.pruning:Components",
    outcome="server_app.artifacts.structured_model:SlicedOutcome",
    baseline="strategies.baselines:slicegpt_of_all",
)
