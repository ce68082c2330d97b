"""FLAP: settings and contracts.

Clients send the mean and spread of the inputs of two matrices per block. Channels that fluctuate
least are removed.
"""

from functools import partial
from typing import ClassVar

import numpy as np
from pydantic import Field

from espalier.errors import ProtocolError
from espalier.messages.blobs.cuts import delivery_of_cuts
from espalier.messages.contract import Contract
from espalier.messages.message import Fields, MessageBody
from espalier.messages.parts import MAX_SAMPLES, Reply, Report, require_tokens
from espalier.messages.tensor_blobs import TensorSpec, views
from espalier.models.plan import ModelPlan, PlanOf, block_key
from espalier.models.structure import ADDED_BIASES
from espalier.settings.pruning import StructuredSettings
from espalier.settings.run import RunSettings


class FlapSettings(StructuredSettings):
    """Table ``[flap]`` (An et al. 2024, section 3), with the metric WIFV."""

    FEDERATION: ClassVar[tuple[str, ...]] = (*StructuredSettings.FEDERATION, "trimmed-clients")
    RULES: ClassVar[tuple[str, ...]] = ("clipped-mean", "mean", "trimmed-mean", "median")

    square_attention: bool = Field(
        True,
        description=(
            "Square the scores of attention before they are standardised, as in the published code."
        ),
    )
    bias_compensation: bool = Field(
        True,
        description=(
            "Add the mean of what was removed as a bias, also in families that have no bias there"
            " (section 3.4)."
        ),
    )


MAX_INPUT = 1e6
"""Maximum absolute value of an input.

No real model exceeds it, so moments beyond it are not honest.
"""


class MomentsReport(Report):
    """Fields of a reply with moments."""

    tokens: int = Field(ge=1)
    """Number of tokens of the statistics."""


def mean_name(linear: str) -> str:
    """Return the tensor name of the mean input of a matrix."""
    return f"{linear}.mean"


def squares_name(linear: str) -> str:
    """Return the tensor name of the sum of squared deviations from the mean input."""
    return f"{linear}.squares"


def moment_specs(plan: ModelPlan) -> dict[str, dict[str, TensorSpec]]:
    """Return the specs of the blobs of a reply, one per block.

    Each has two numbers per input channel of the attention output and of the down projection.
    """
    specs = {}
    for block in plan.blocks:
        columns = {
            linear.name: linear.shape[1] for linear in block.linears if linear.name in ADDED_BIASES
        }
        names = (
            (name(linear), width)
            for linear, width in columns.items()
            for name in (mean_name, squares_name)
        )
        specs[block_key(block.index)] = {name: TensorSpec("F32", (width,)) for name, width in names}
    return specs


def possible(key: str, blob: bytes, tokens: int) -> None:
    """Check that moments can come from inputs of at most ``tokens`` tokens.

    Raises
    ------
    ProtocolError
        If a number is not finite or out of range.
    """
    for name, values in views(blob).items():
        lowest, most = (
            # A sum of squared deviations is not negative; a mean has the range of the inputs.
            (0.0, tokens * MAX_INPUT**2) if name.endswith(".squares") else (-MAX_INPUT, MAX_INPUT)
        )
        if not (np.isfinite(values).all() and values.min() >= lowest and values.max() <= most):
            raise ProtocolError(
                f"{key} {name}: a number is not finite, or none that inputs of a model have"
            )


def contract(request: MessageBody, plan_of: PlanOf, run: RunSettings) -> Contract:
    """Return the contract of a ``train`` message (part 0), or of a ``fetch`` of a later part."""

    def check_report(report: Fields) -> None:
        if isinstance(report, MomentsReport):
            require_tokens("MomentsReport", report.tokens, run)

    reply = Reply(
        report=MomentsReport,
        specs=moment_specs(plan_of()),
        observer=OBSERVER,
        more="The moments of further blocks, as in train.",
        check_values=partial(possible, tokens=MAX_SAMPLES * run.data.sequence_length),
        check_report=check_report,
    )
    return reply.contract(request, run)


def biases(run: RunSettings) -> tuple[str, ...]:
    """Return the names of the matrices that get a bias."""
    return ADDED_BIASES if run.of(FlapSettings).bias_compensation else ()


def delivery(request: MessageBody, plan_of: PlanOf, run: RunSettings) -> Contract:
    """Return the contract of a ``deliver`` that pushes a part of the cut for evaluation."""
    return delivery_of_cuts(request, plan_of, run, biases(run))


OBSERVER = (
    "For every input channel of the attention's output and of `down`, in every block: its mean over"
    " this client's samples, how much it varies, and the number of tokens. Over few tokens the"
    " means come close to the values of single tokens; the site's `min-tokens` sets the minimum."
    " Whoever knows some of the samples can recognise them in the reply, whatever `min-tokens`"
    " says. Also how long the work took."
)
