"""Rescaling stage of Mask Tuning (Kwon et al. 2022): normal equations and scales of kept groups.

Samples pass through the blocks of the dense model with the removed groups set to zero, so that
every block gets the input that it gets in the pruned model. Before the removed groups of a part are
set to zero, the output that all of its groups would give is recorded. Scales bring the output of
the kept groups close to that output, separately for each block and kind.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from espalier.hf.group_scores.taylor import taylor_cut, taylor_scores
from espalier.hf.machine.computing import Computing
from espalier.hf.opening.opened_model import OpenedModel
from espalier.hf.stream.block_stream import BlockStream
from espalier.messages.blobs.cuts import MAX_SCALE, pack_cut
from espalier.methods.pruning.llm_pruner import LlmPrunerSettings, equation_places
from espalier.models.groups import Cut, Groups
from espalier.models.structure import READERS, group_size
from espalier.progress import report_each
from pruning_kernels.groups.mask_tuning import best_scales, joint_outputs
from pruning_kernels.groups.slicing import second_moments

Equations = tuple[Tensor, Tensor]
"""Normal equations of the kept groups, float64, on the CPU.

The first tensor is (groups, groups): inner products of the outputs of each two kept groups. The
second is (groups,): inner product of the output of each kept group with the output of all groups of
the block.
"""


class _Silencing:
    """Forward pre-hook that sums second moments of the input, then sets removed groups to zero."""

    def __init__(self, stays: Tensor, watches: bool) -> None:
        self.moments: Tensor | None = None
        self._stays = stays
        self._watches = watches

    def __call__(self, _: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if self._watches:
            moments = second_moments(inputs[0].flatten(0, -2))
            self.moments = moments if self.moments is None else self.moments.add_(moments)
        return (inputs[0] * self._stays, *inputs[1:])


@torch.no_grad()
def normal_equations(
    stream: BlockStream, samples: Tensor, cut: Cut, job: LlmPrunerSettings, of_samples: int
) -> Iterator[Equations]:
    """Yield the normal equations of one client, in the order of ``equation_places``.

    Parameters
    ----------
    samples : (num_samples, sequence_length), int64, calibration samples of the dense model
    cut : removed groups
    of_samples : number of samples by whose tokens sums are divided; the same for all clients
    """
    plan = stream.model.plan
    groups = Groups.of(plan)
    places = set(equation_places(plan, cut, job))
    # Blocks after the last place are not needed.
    last = max((index for index, _ in places), default=-1)
    activations = stream.start(samples)
    for block_plan in report_each(plan.blocks[: last + 1], "watching block"):
        index = block_plan.index
        with stream.block(index, following=index + 1) as block, ExitStack() as hooks:
            linears = stream.linears(index, block)
            silencing: dict[str, _Silencing] = {}
            kept = {kind: torch.from_numpy(~cut[groups.at(index, kind)]) for kind in READERS}
            for kind in (kind for kind, mask in kept.items() if not mask.all()):
                linear = linears[READERS[kind]]
                size = group_size(plan, READERS[kind], kind)
                feature_mask = kept[kind].repeat_interleave(size).to(linear.weight)
                silencing[kind] = _Silencing(feature_mask, (index, kind) in places)
                hooks.callback(linear.register_forward_pre_hook(silencing[kind]).remove)
            activations.through(index, block)
            for kind in (kind for kind in job.rescaled if (index, kind) in places):
                moments = silencing[kind].moments
                size = group_size(plan, READERS[kind], kind)
                assert moments is not None
                joint = joint_outputs(moments, linears[READERS[kind]].weight, size).cpu()
                rows = joint[kept[kind]] / (of_samples * samples.shape[1])
                yield rows[:, kept[kind]], rows.sum(dim=1)


RESCALE_DAMPING = 0.01
"""Strength with which scales are pulled to 1, relative to the mean square of a group's output."""


def scales_or_none(equations: Equations) -> Tensor | None:
    """Return the scales of the kept groups, (groups,), float64.

    Returns None if the equations have no solution, or if a scale exceeds the limit of the paper
    (section 4.3).
    """
    scales = best_scales(*equations, RESCALE_DAMPING)
    # The comparison is False for NaN, which means that there is no solution.
    return scales if bool((scales.abs() <= MAX_SCALE).all()) else None


def scaled_cuts(
    groups: Groups,
    cut: Cut,
    scales_of: Callable[[int, str], Tensor | None],
    job: LlmPrunerSettings,
) -> Iterator[tuple[bytes, Mapping[str, NDArray[np.float32]]]]:
    """Yield the blob (``blobs.cuts``) of each block with scales, and the scales by kind.

    ``scales_of`` returns the scales of the kept groups of a block and kind. It is called in the
    order of ``equation_places``. None leaves the scales at 1.
    """
    places = set(equation_places(groups.plan, cut, job))
    for block in groups.plan.blocks:
        index = block.index
        scales = {}
        for kind in job.rescaled:
            kept = ~cut[groups.at(index, kind)]
            # 1 for kept groups, 0 for removed ones.
            scales[kind] = kept.astype(np.float32)
            kept_scales = scales_of(index, kind) if (index, kind) in places else None
            if kept_scales is not None:
                scales[kind][kept] = kept_scales.to(torch.float32).numpy()
        yield pack_cut(groups, cut, index, scales=scales), scales


def tuned_by_one(
    model: OpenedModel,
    computing: Computing,
    samples: Tensor,
    job: LlmPrunerSettings,
    of_samples: int,
) -> list[bytes]:
    """Return the blobs of all blocks, with scales if asked for, for a single client's data."""
    scores = taylor_scores(model, computing, samples, job, of_samples)
    cut = taylor_cut(model, scores, job)
    groups = Groups.of(model.plan)
    if not job.rescaled:
        return [pack_cut(groups, cut, block.index) for block in model.plan.blocks]
    # The equations arrive in the order in which ``scaled_cuts`` requests scales.
    equations = normal_equations(BlockStream(model, computing), samples, cut, job, of_samples)
    return [
        blob
        for blob, _ in scaled_cuts(groups, cut, lambda *_: scales_or_none(next(equations)), job)
    ]
