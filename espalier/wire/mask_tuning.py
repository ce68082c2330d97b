"""What Mask Tuning's refinements send: a factor of the Fisher information of masks, and normal equations of the units' scales.

The equations are of a model that is cut already. What is cut comes along with every request, so that their shapes are a
function of the request alone.
"""

import numpy as np
from numpy.typing import NDArray

from espalier.settings.llm_pruner import LlmPrunerSettings
from espalier.settings.mistakes import Mistake
from espalier.settings.run import RunSettings
from espalier.wire.cuts import cut_specs, unpack_cut
from espalier.wire.messages import Letter
from espalier.wire.payload import TensorSpec, block_key, tensor_specs, views
from espalier.wire.plan import ModelPlan
from espalier.wire.structure import units_of
from espalier.wire.triangles import ROUNDING, are_inner_products, triangle_size

JOINT = "joint"
AIMS = "aims"
"""Tensor names: for each two units that stay the inner product of what they give, a triangle; and for each that with all."""
TINY = 1e-30
"""What rounding makes of numbers that are nearly 0."""
MOST_BYTES = 1 << 30
"""Of a blob; ``part-bytes`` goes no further."""

CutOfBlocks = list[dict[str, NDArray[np.bool_]]]
"""For each block, (units,) by kind: True for units that are cut."""


def fisher_name(kind: str) -> str:
    """Tensor name of the factor of a block's units of a kind."""
    return f"{kind}.fisher"


def fisher_rows(units: int, run: RunSettings) -> int:
    """Rows of a factor: more would say no more of so many windows."""
    return min(run.data.windows, units)


def fisher_spec(units: int, run: RunSettings) -> TensorSpec:
    """The factor as it travels, without what is zero by its form."""
    rows = fisher_rows(units, run)
    return TensorSpec("F32", (rows * units - triangle_size(rows - 1),))


def require_factor(key: str, factor: NDArray[np.float32], scores: NDArray[np.float32]) -> None:
    """Raise Mistake if a factor's numbers are not finite, or say more than the scores beside it.

    A score is the sum of a column's squares; so what bounds the scores of a client bounds its factor.
    """
    most = float(scores.sum(dtype=np.float64)) * (1 + ROUNDING) + TINY
    if not (np.isfinite(factor).all() and np.square(factor, dtype=np.float64).sum() <= most):
        raise Mistake(
            f"{key}: a factor's number is not finite, or its squares are more than the scores"
        )


# ----- rescaling ------------------------------------------------------------------------------------------------------------


def told_cut(request: Letter, plan: ModelPlan) -> CutOfBlocks | None:
    """What is cut, as a request says it; None where it says so in no permitted form, which its contract refuses then."""
    specs = cut_specs(plan, ())
    if request.blobs.keys() != specs.keys() or any(
        tensor_specs(blob) != specs[key] for key, blob in request.blobs.items()
    ):
        return None
    return [
        unpack_cut(request.blobs[block_key(block.index)], units_of(plan, block))
        for block in plan.blocks
    ]


def equation_key(index: int, kind: str) -> str:
    """Name of the blob of a block's units of a kind."""
    return f"{block_key(index)}-{kind}"


def equation_places(cut: CutOfBlocks, job: LlmPrunerSettings) -> list[tuple[int, str]]:
    """Blocks and kinds of which there are equations: those that lost a unit, in order."""
    return [
        (index, kind) for index, own in enumerate(cut) for kind in job.rescaled if own[kind].any()
    ]


def equation_specs(
    plan: ModelPlan, cut: CutOfBlocks | None, job: LlmPrunerSettings
) -> dict[str, dict[str, TensorSpec]]:
    """The blobs of a reply, one per place; where it is not known what is cut, as many and as large as none can be."""
    if cut is None:
        staying = {
            (block.index, kind): getattr(units_of(plan, block), kind)
            for block in plan.blocks
            for kind in job.rescaled
        }
    else:
        staying = {
            place: int((~cut[place[0]][place[1]]).sum()) for place in equation_places(cut, job)
        }
    return {
        equation_key(*place): {
            JOINT: TensorSpec("F32", (triangle_size(stay),)),
            AIMS: TensorSpec("F32", (stay,)),
        }
        for place, stay in staying.items()
    }


def require_sendable(plan: ModelPlan, job: LlmPrunerSettings) -> None:
    """Refuse equations of so many units that they fit into no message.

    Raises
    ------
    Mistake
        It begins with the key of the method's table.
    """
    for block in plan.blocks:
        for kind in job.rescaled:
            number = getattr(units_of(plan, block), kind)
            if (size := 4 * triangle_size(number)) > MOST_BYTES:
                raise Mistake(
                    f"rescale = '{job.rescale}': the normal equations of {number} {kind} of a block"
                    f" take up to {size} bytes, a message has {MOST_BYTES}; set it to 'groups' or"
                    " 'off'"
                )


def require_equations(key: str, blob: bytes) -> None:
    """Raise Mistake if normal equations are none that real outputs can have."""
    tensors = views(blob)
    aims = tensors[AIMS]
    if not (np.isfinite(aims).all() and are_inner_products(tensors[JOINT], len(aims), TINY)):
        raise Mistake(
            f"{key}: a number is not finite, or the numbers are no inner products of what units"
            " give"
        )
