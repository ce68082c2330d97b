"""Statistics of Mask Tuning: factors of the Fisher information, and normal equations.

The Fisher information is that of the masks, and the equations determine the scales of prunable
groups. Source: Kwon et al. 2022. The equations refer to a model that is cut already. Every request
includes the cut, so that their shapes are a function of the request.
"""

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from espalier.errors import ProtocolError
from espalier.messages.blobs.cuts import cut_specs, read_cut
from espalier.messages.message import MessageBody
from espalier.messages.tensor_blobs import TensorSpec, tensor_specs, views
from espalier.models.groups import Cut, Groups
from espalier.models.plan import ModelPlan, block_key
from espalier.models.structure import sizes_of
from espalier.models.triangles import ROUNDING, are_inner_products, triangle_size
from espalier.settings.run import RunSettings

if TYPE_CHECKING:
    from espalier.methods.llm_pruner.settings import LlmPrunerSettings

JOINT = "joint"
"""Name of the tensor with the inner products of the outputs of every two remaining groups.

It is the upper triangle of a symmetric matrix.
"""
AIMS = "aims"
"""Name of the tensor with the inner products of the remaining groups' outputs and their targets.

The target is the output of all groups of the block and kind, including the cut ones.
"""
TINY = 1e-30
"""Absolute tolerance for rounding errors of numbers near 0."""
MAX_BYTES = 1 << 30
"""Maximum size of a blob in bytes; ``part-bytes`` has the same limit."""


def fisher_name(kind: str) -> str:
    """Return the tensor name of the Fisher factor of a kind of prunable group."""
    return f"{kind}.fisher"


def fisher_rows(groups: int, run: RunSettings) -> int:
    """Return the number of rows of a factor.

    The rank is at most the number of calibration samples, so more rows would add no information.
    """
    return min(run.data.num_samples, groups)


def fisher_spec(groups: int, run: RunSettings) -> TensorSpec:
    """Return the spec of a factor as it is sent: flat, without the zeros below its diagonal."""
    rows = fisher_rows(groups, run)
    # Row i of the triangular factor has i leading zeros, which are not sent.
    return TensorSpec("F32", (rows * groups - triangle_size(rows - 1),))


def require_factor(key: str, factor: NDArray[np.float32], scores: NDArray[np.float32]) -> None:
    """Check that a factor is finite and that its squares do not exceed the scores.

    A score is the sum of the squares of a column. The limit on a client's scores therefore also
    limits its factor.

    Raises
    ------
    ProtocolError
        If the check fails.
    """
    most = float(scores.sum(dtype=np.float64)) * (1 + ROUNDING) + TINY
    if not (np.isfinite(factor).all() and np.square(factor, dtype=np.float64).sum() <= most):
        raise ProtocolError(
            f"{key}: a factor's number is not finite, or its squares are more than the scores"
        )


# ----- rescaling -----


def told_cut(request: MessageBody, plan: ModelPlan) -> Cut | None:
    """Return the cut that a request states; None if it is malformed.

    The contract of the request then refuses it.
    """
    specs = cut_specs(plan, ())
    if request.blobs.keys() != specs.keys() or any(
        tensor_specs(blob) != specs[key] for key, blob in request.blobs.items()
    ):
        return None
    return read_cut(Groups.of(plan), lambda index: request.blobs[block_key(index)])


def equation_key(index: int, kind: str) -> str:
    """Return the key of the blob with the equations of a block and kind."""
    return f"{block_key(index)}-{kind}"


def equation_places(plan: ModelPlan, cut: Cut, job: "LlmPrunerSettings") -> list[tuple[int, str]]:
    """Return the blocks and kinds with equations, in order: those with at least one cut group."""
    groups = Groups.of(plan)
    return [
        (block.index, kind)
        for block in plan.blocks
        for kind in job.rescaled
        if cut[groups.at(block.index, kind)].any()
    ]


def equation_specs(
    plan: ModelPlan, cut: Cut | None, job: "LlmPrunerSettings"
) -> dict[str, dict[str, TensorSpec]]:
    """Return the specs of the blobs of a reply, one per block and kind.

    Parameters
    ----------
    plan
        Plan of the uncut model.
    cut
        Cut of the request. If it is None, the specs are those of equations for all groups, which
        are an upper limit.
    job
        Settings of the method.
    """
    groups = Groups.of(plan)
    if cut is None:
        cut = groups.none
        places = [(block.index, kind) for block in plan.blocks for kind in job.rescaled]
    else:
        places = equation_places(plan, cut, job)
    staying = {place: int((~cut[groups.at(*place)]).sum()) for place in places}
    return {
        equation_key(*place): {
            JOINT: TensorSpec("F32", (triangle_size(stay),)),
            AIMS: TensorSpec("F32", (stay,)),
        }
        for place, stay in staying.items()
    }


def require_sendable(plan: ModelPlan, job: "LlmPrunerSettings") -> None:
    """Check that the normal equations of every block fit in a message.

    Raises
    ------
    ProtocolError
        If they do not; the error begins with a key of the method's table.
    """
    for block in plan.blocks:
        for kind in job.rescaled:
            number = getattr(sizes_of(plan, block), kind)
            if (size := 4 * triangle_size(number)) > MAX_BYTES:
                raise ProtocolError(
                    f"rescale = '{job.rescale}': the normal equations of {number} {kind} of a block"
                    f" take up to {size} bytes, a message has {MAX_BYTES}; set it to 'groups' or"
                    " 'off'"
                )


def require_equations(key: str, blob: bytes) -> None:
    """Check that normal equations can come from real outputs.

    Raises
    ------
    ProtocolError
        If a number is not finite, or if the numbers cannot be inner products.
    """
    tensors = views(blob)
    aims = tensors[AIMS]
    if not (np.isfinite(aims).all() and are_inner_products(tensors[JOINT], len(aims), TINY)):
        raise ProtocolError(
            f"{key}: a number is not finite, or the numbers are not inner products of the outputs"
            " of groups"
        )
