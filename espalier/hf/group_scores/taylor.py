"""LLM-Pruner (Ma et al. 2023): first-order importance of prunable groups, and their removal.

The gradient is that of the mean loss over a client's samples with respect to the weights of the
blocks' matrices. The whole model is in memory in float32. With signed sums, the gradient of each
step is added up and freed immediately. Magnitudes need the gradient of all samples.
"""

from collections.abc import Callable, Mapping
from itertools import product

import torch
from torch import Tensor, nn

from espalier.errors import InputError
from espalier.hf.machine.computing import Computing
from espalier.hf.opening.opened_model import OpenedModel
from espalier.hf.stream.block_stream import samples_per_batch
from espalier.hf.stream.input_statistics import pack_statistics, read_statistics
from espalier.hf.structured.selection import in_sequence, lowest
from espalier.hf.whole.model import load_whole
from espalier.methods.pruning.llm_pruner import (
    LlmPrunerSettings,
    cut_blocks,
    fisher_name,
    score_name,
)
from espalier.models.groups import Cut, Groups
from espalier.models.plan import LinearPlan, ModelPlan
from espalier.models.structure import (
    COLUMNS,
    GROUP_KINDS,
    ROWS,
    group_size,
    lines_of_groups,
    sizes_of,
)
from espalier.progress import report_each
from pruning_kernels.groups.groups import coupled_sums
from pruning_kernels.groups.mask_tuning import (
    fisher_factor,
    rearranged,
    unpacked_factor,
)
from pruning_kernels.groups.slicing import packed

BlockScores = Mapping[str, Tensor]
"""Scores of a block's prunable groups by kind: (groups,), float64.

Under ``fisher_name`` there may also be a factor of the Fisher information of all masks, (rows,
groups).
"""
FisherOf = Callable[[int, str], Tensor]
"""Function from the number of a block and a kind to the Fisher factor."""


def taylor_scores(
    model: OpenedModel,
    computing: Computing,
    samples: Tensor,
    job: LlmPrunerSettings,
    of_samples: int,
    max_rows: int | None = None,
) -> dict[int, dict[str, Tensor]]:
    """Return one client's scores of the prunable groups, by number of the block that may be pruned.

    Parameters
    ----------
    model : the dense model
    samples : (num_samples, sequence_length), int64, calibration samples
    job : settings of the method; ``squared`` is the diagonal of the Fisher information of masks
        (Kwon et al. 2022)
    of_samples : number of samples by which the sum of losses is divided. It is the same for all
        clients, so that a client with more samples counts more
    max_rows : maximum number of rows of a Fisher factor, for which the gradients of all samples
        are kept; None for the number of samples
    """
    hf_model = load_whole(model, computing, "float32")
    scores = _Scores(model, hf_model, job, of_samples)
    squared = job.element == "squared"
    for batch in report_each(
        # The Fisher information needs the gradient of each single sample.
        samples.split(1 if squared else samples_per_batch(samples.shape[1])),
        "passing samples",
    ):
        tokens = batch.to(computing.device)
        loss = hf_model(input_ids=tokens, labels=tokens, use_cache=False).loss
        # The loss is a mean over the batch, so it is weighted by the number of its samples.
        (loss if squared else loss * (len(batch) / of_samples)).backward()
        # Magnitudes are taken of the gradient of all samples; other scores are sums over steps.
        if job.element != "absolute":
            scores.collect()
    if job.element == "absolute":
        scores.collect()
    return scores.with_factors(max_rows or len(samples))


class _Scores:
    """Scores of all prunable groups, to which gradients are added step by step.

    Creating it enables the gradients of the weights of ``whole`` that scores need.
    """

    def __init__(
        self, model: OpenedModel, hf_model: nn.Module, job: LlmPrunerSettings, of_samples: int
    ) -> None:
        self._model = model
        self._job = job
        self._of_samples = of_samples
        # Mask gradients of single samples, for the kinds that are rearranged.
        self._gradients: dict[tuple[int, str], list[Tensor]] = {}
        blocks = cut_blocks(model.plan, job)
        self._scores = {index: _zeros(model.plan, index) for index in blocks}
        self._weights = [
            (index, linear, _weight(model, hf_model, index, linear))
            for index in blocks
            for linear in model.plan.blocks[index].linears
            # Gradients of masks need only the matrices that read prunable groups.
            if job.element != "squared" or COLUMNS[linear.name] in GROUP_KINDS
        ]

    def collect(self) -> None:
        """Add the scores of the current gradients, and free the gradients."""
        for index, linear, weight in self._weights:
            if weight.grad is not None:
                product = weight.detach() * weight.grad
                if self._job.element == "squared":
                    self._add_squared(index, linear, product)
                else:
                    _add(self._model, self._scores[index], linear, product, self._job)
            # Free the gradient before the next step.
            weight.grad = None

    def _add_squared(self, index: int, linear: LinearPlan, product: Tensor) -> None:
        """Add the squares of the masks' gradients of one sample."""
        # The gradient of a mask on a group's output is the sum over the matrix that reads it.
        kind = COLUMNS[linear.name]
        size = group_size(self._model.plan, linear.name, kind)
        mask_gradients = coupled_sums(product, 1, size).cpu()
        self._scores[index][kind].add_(mask_gradients.square() / self._of_samples)
        if kind in self._job.rearranged:
            self._gradients.setdefault((index, kind), []).append(mask_gradients.to(torch.float32))

    def with_factors(self, max_rows: int) -> dict[int, dict[str, Tensor]]:
        """Return the scores with the Fisher factors, and free the gradients of the latter."""
        for index, kind in product(self._scores, self._job.rearranged):
            gradients = torch.stack(self._gradients.pop((index, kind)))
            rows = gradients.double() / self._of_samples**0.5
            if not rows.isfinite().all():
                raise InputError(
                    "the gradient of a mask is not a number; look for weights of the model that are"
                    " none"
                )
            factor = fisher_factor(rows, min(max_rows, rows.shape[1]))
            self._scores[index][fisher_name(kind)] = factor
        return self._scores


def _zeros(plan: ModelPlan, index: int) -> dict[str, Tensor]:
    """Return a score of zero for each prunable group of a block, float64."""
    sizes = sizes_of(plan, plan.blocks[index])
    return {kind: torch.zeros(getattr(sizes, kind), dtype=torch.float64) for kind in GROUP_KINDS}


def _weight(
    model: OpenedModel, hf_model: nn.Module, index: int, linear: LinearPlan
) -> nn.Parameter:
    """Return a matrix of the whole model, and enable its gradient."""
    path = model.family.module_path(index, linear.name)
    weight = hf_model.get_parameter(f"{path}.weight")
    weight.requires_grad_(True)
    return weight


def _add(
    model: OpenedModel,
    scores: Mapping[str, Tensor],
    linear: LinearPlan,
    products: Tensor,
    job: LlmPrunerSettings,
) -> None:
    """Add the products of weight and gradient of a matrix to the scores of its prunable groups."""
    products = products.abs() if job.element == "absolute" else products
    for side, kinds in enumerate((ROWS, COLUMNS)):
        if (kind := kinds[linear.name]) in GROUP_KINDS:
            size = group_size(model.plan, linear.name, kind)
            order = torch.from_numpy(
                lines_of_groups(model.plan, linear.name, kind, len(scores[kind])).ravel()
            )
            scores[kind].add_(coupled_sums(products, side, size, order).cpu())


def pack_scores(scores: BlockScores) -> bytes:
    """Serialise the scores and Fisher factors of a block, float32."""
    group_scores = {score_name(kind): scores[kind] for kind in GROUP_KINDS}
    factors = {name: packed(value) for name, value in scores.items() if name not in GROUP_KINDS}
    return pack_statistics(group_scores | factors)


def unpack_scores(blob: bytes, job: LlmPrunerSettings, max_rows: int) -> dict[str, Tensor]:
    """Return the scores and Fisher factors of a block from a blob."""
    tensors = read_statistics(blob)
    block_scores = {kind: tensors[score_name(kind)] for kind in GROUP_KINDS}
    for kind in job.rearranged:
        name = fisher_name(kind)
        block_scores[name] = read_factor(tensors[name], len(block_scores[kind]), max_rows)
    return block_scores


def read_factor(flat: Tensor, groups: int, max_rows: int) -> Tensor:
    """Return a Fisher factor, (rows, groups), float64, from its packed form."""
    return unpacked_factor(flat.double(), min(max_rows, groups), groups)


def taylor_cut(
    model: OpenedModel,
    scores: Mapping[int, BlockScores],
    job: LlmPrunerSettings,
    fisher_of: FisherOf | None = None,
) -> Cut:
    """Choose the prunable groups to remove, by the scores of the blocks that may be pruned.

    ``fisher_of`` returns the Fisher factors of kinds that are rearranged, and is called once per
    block and kind; None reads them from ``scores``.
    """
    groups = Groups.of(model.plan, cut_blocks(model.plan, job))
    values = in_sequence(groups, scores)
    importance = values.abs() if job.element == "signed" else values
    cut = lowest(groups, importance, job, groups.reachable(job))
    for index, kind in product(groups.blocks, job.rearranged):
        factor = scores[index][fisher_name(kind)] if fisher_of is None else fisher_of(index, kind)
        kind_cut = cut[groups.at(index, kind)]
        kind_cut[:] = rearranged(factor, torch.from_numpy(kind_cut)).numpy()
    return cut
