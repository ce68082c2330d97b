"""LLM-Pruner (Ma et al. 2023): what the loss would change without a unit, to the first order, and which units are cut by it.

The gradient is that of the mean loss over a party's windows, by the weights of the blocks' matrices, made with the whole model
in memory in float32. With signed sums a step's gradient is summed up and let go at once; magnitudes need that of all windows.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from espalier.modeling.block_stream import windows_per_batch
from espalier.modeling.computing import Computing
from espalier.modeling.opened import OpenedModel
from espalier.modeling.structured.units import ModelUnits
from espalier.modeling.whole import load_whole
from espalier.pace.beats import beats
from espalier.settings.llm_pruner import LlmPrunerSettings
from espalier.wire.cuts import KINDS, pack_cut
from espalier.wire.llm_pruner import cut_blocks, score_name
from espalier.wire.payload import pack_tensors, unpack_tensors
from espalier.wire.plan import LinearPlan
from espalier.wire.structure import COLUMNS, ROWS, unit_size, units_of
from pruning_kernels.units import coupled_sums

BlockScores = Mapping[str, Tensor]
"""(units,), float64, by kind."""


def taylor_scores(
    model: OpenedModel, computing: Computing, windows: Tensor, job: LlmPrunerSettings, of_windows: int
) -> list[dict[str, Tensor]]:
    """What the units of the blocks that may be cut are worth to one party.

    Parameters
    ----------
    windows : (windows, tokens), int64
    job : how, and of which blocks; ``squared`` is the diagonal of the Fisher information of masks (Kwon et al. 2022)
    of_windows : what the sum of their losses is divided by, the same for all parties, so that who has more counts more
    """
    whole = load_whole(model, computing, "float32")
    blocks = cut_blocks(model.plan, job)
    scores = [
        {kind: torch.zeros(getattr(units_of(model.plan, model.plan.blocks[i]), kind)).double() for kind in KINDS}
        for i in blocks
    ]
    weights = [
        (place, linear, _weight(model, whole, index, linear))
        for place, index in enumerate(blocks)
        for linear in model.plan.blocks[index].linears
        if job.element != "squared" or COLUMNS[linear.name] in KINDS
    ]

    def collect() -> None:
        for place, linear, weight in weights:
            if weight.grad is not None:
                _add(model, scores[place], linear, weight.detach() * weight.grad, job, of_windows)
            weight.grad = None

    squared = job.element == "squared"
    for batch in beats(windows.split(1 if squared else windows_per_batch(windows.shape[1])), "passing windows"):
        tokens = batch.to(computing.device)
        loss = whole(input_ids=tokens, labels=tokens, use_cache=False).loss
        (loss if squared else loss * (len(batch) / of_windows)).backward()
        if job.element != "absolute":
            collect()
    if job.element == "absolute":
        collect()
    return scores


def _weight(model: OpenedModel, whole: nn.Module, index: int, linear: LinearPlan) -> nn.Parameter:
    """A matrix of the whole model, of which a gradient is made."""
    module = whole.get_submodule(f"{model.family.blocks}.{index}.{model.family.linears[linear.name]}")
    weight = module.weight
    assert isinstance(weight, nn.Parameter)
    weight.requires_grad_(True)
    return weight


def _add(
    model: OpenedModel,
    scores: Mapping[str, Tensor],
    linear: LinearPlan,
    products: Tensor,
    job: LlmPrunerSettings,
    of_windows: int,
) -> None:
    """Add a matrix's part to the scores of the units that its weights belong to.

    ``squared`` takes the matrix alone that reads the unit: there the sum is the gradient of a mask on what the unit gives.
    """
    if job.element == "squared":
        kind = COLUMNS[linear.name]
        sums = coupled_sums(products, 1, unit_size(model.plan, linear.name, kind))
        scores[kind].add_((sums.square() / of_windows).cpu())
        return
    products = products.abs() if job.element == "absolute" else products
    for side, kinds in enumerate((ROWS, COLUMNS)):
        if (kind := kinds[linear.name]) in KINDS:
            scores[kind].add_(coupled_sums(products, side, unit_size(model.plan, linear.name, kind)).cpu())


def pack_scores(scores: BlockScores) -> bytes:
    """Serialise a block's scores, float32."""
    return pack_tensors({score_name(kind): scores[kind].to(torch.float32).numpy() for kind in KINDS})


def unpack_scores(blob: bytes) -> dict[str, Tensor]:
    """Read them."""
    arrays = unpack_tensors(blob)
    return {kind: torch.from_numpy(arrays[score_name(kind)].copy()).double() for kind in KINDS}


def taylor_cuts(model: OpenedModel, scores: Sequence[BlockScores], job: LlmPrunerSettings) -> Iterator[bytes]:
    """Decide what is cut: for each block the blob of ``espalier.wire.cuts``; the scores are those of the blocks that may be."""
    units = ModelUnits.of(model.plan, cut_blocks(model.plan, job))
    worth: Callable[[Tensor], Tensor] = torch.abs if job.element == "signed" else torch.positive
    scores = [{kind: worth(own[kind]) for kind in KINDS} for own in scores]
    cuts = dict(zip(units.blocks, units.lowest(scores, job, units.share_of_units(model.plan, job)), strict=True))
    for block in model.plan.blocks:
        whole = {kind: np.zeros(getattr(units_of(model.plan, block), kind), dtype=np.bool_) for kind in KINDS}
        yield pack_cut(cuts.get(block.index, whole), {})
