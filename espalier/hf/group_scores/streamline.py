"""LLM-Streamline (Chen et al. 2025): removal of adjacent blocks that hardly change their input.

Stretches of blocks are compared by the cosine between the hidden states before and after the
stretch, token by token (section 2.2). The layer that replaces a stretch is trained in
``espalier/training/replacement.py``.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from espalier.amounts import count
from espalier.errors import InputError
from espalier.hf.files.dtypes import TORCH_DTYPES
from espalier.hf.opening.opened_model import OpenedModel
from espalier.hf.stream.block_stream import BlockStream
from espalier.hf.whole.full_tensors import stored_values
from espalier.methods.pruning.llm_streamline import layer_shapes
from espalier.models.plan import block_key
from espalier.models.structure import Structure
from espalier.progress import report_each


@torch.no_grad()
def stretch_cosines(stream: BlockStream, samples: Tensor, span: int, *, after_norm: bool) -> Tensor:
    """Return the mean cosine between the hidden states before and after each stretch of blocks.

    The result is (stretches,), float64, by the first block of the stretch. The hidden states of
    ``span + 1`` places are held, in memory or on disk, depending on the settings.

    The published code reads ``hidden_states`` of transformers, whose last entry is the output of
    the model's final norm. The norm scales each dimension by its own weight, which rotates the
    vector. The last stretch then has a lower cosine than its blocks give.

    Parameters
    ----------
    samples : (num_samples, sequence_length), int64, calibration samples of the dense model
    span : number of blocks of a stretch
    after_norm : use the last block's output after the final norm, as the published code does,
        instead of before it
    """
    activations = stream.start(samples)
    means = list[float]()
    # Hidden states before each stretch that has begun.
    stretch_inputs = deque([activations.copied()])
    for block_plan in report_each(stream.model.plan.blocks, "comparing block"):
        index = block_plan.index
        with stream.block(index, following=index + 1) as block:
            activations.through(index, block)
        if index + 1 >= span:
            is_last = index + 1 == len(stream.model.plan.blocks)
            with (
                stream.final_norm() if is_last and after_norm else nullcontext(nn.Identity())
            ) as norm:
                pairs = zip(stretch_inputs.popleft().batches(), activations.batches(), strict=True)
                cosines = [
                    torch.cosine_similarity(inputs.float(), norm(outputs).float(), dim=-1)
                    for inputs, outputs in pairs
                ]
                total = sum(float(cosine.double().sum()) for cosine in cosines)
                means.append(total / samples.numel())
        if index + 1 + span <= len(stream.model.plan.blocks):
            stretch_inputs.append(activations.copied())
    return torch.tensor(means, dtype=torch.float64)


def most_similar_stretch(cosines: Tensor) -> int:
    """Return the first block of the stretch with the highest cosine; of equal ones, the first."""
    return int(cosines.argmax())


def first_layer(model: OpenedModel, start: int) -> dict[str, Tensor]:
    """Return the first of the removed blocks, with which the replacement layer begins.

    It is float32, by canonical name.
    """
    key = block_key(start)
    return stored_values(model, {key: list(layer_shapes(model.plan.blocks[start]))})[key]


def stays(num_blocks: int, start: int, span: int, replaced: bool) -> list[int]:
    """Return the indices of the remaining blocks of the base.

    If a layer replaces the stretch, it takes the place of the first block of the stretch, whose
    index is included.
    """
    return [*range(start + replaced), *range(start + span, num_blocks)]


def open_streamlined(
    model: OpenedModel, start: int, span: int, layer: Mapping[str, Tensor] | None
) -> OpenedModel:
    """Open the base without the ``span`` blocks from ``start`` on.

    ``layer`` has the float32 tensors of the layer that replaces them, by canonical name; they are
    rounded to the dtypes of the files. None stands for no layer.
    """
    structure = Structure.whole(model.plan).with_blocks(
        stays(len(model.plan.blocks), start, span, layer is not None)
    )
    replaced: dict[str, Tensor] = {}
    for name, value in (layer or {}).items():
        path = model.family.parameter_path(name, start)
        assert path is not None
        replaced[path] = value.to(TORCH_DTYPES[model.checkpoint.tensors[path].dtype])
    return OpenedModel(model.directory, structure, replaced)


def require_streamlined(model: OpenedModel, span: int, replaced: bool) -> Iterator[OpenedModel]:
    """Yield the pruned models that a run can lead to, for checks before the run.

    They contain a block of the base instead of the trained layer.

    Raises
    ------
    InputError
        The model has too few blocks. The message begins with the key in the method's table.
    """
    if span > len(model.plan.blocks):
        raise InputError(
            f"pruning.ratio: {span} of {count(len(model.plan.blocks), 'block')} would be removed,"
            " one of them for the layer that is trained; lower it, or set replacement to 'none'"
        )
    uncut = Structure.whole(model.plan)
    num_blocks = len(model.plan.blocks)
    # If all blocks have the same shape, one model stands for all.
    is_uniform = len(set(uncut.base)) == 1
    for start in range(1 if is_uniform else num_blocks - span + 1):
        yield OpenedModel(
            model.directory, uncut.with_blocks(stays(num_blocks, start, span, replaced))
        )
