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
from espalier.hf.files.tensor_pieces import TORCH_DTYPES
from espalier.hf.opening.opened import OpenedModel
from espalier.hf.stream.block_stream import Activations, BlockStream
from espalier.hf.whole.full_tensors import stored_values
from espalier.messages.tensor_blobs import pack_tensors, unpack_tensors
from espalier.methods.llm_streamline import COSINES, layer_shapes
from espalier.models.plan import block_key
from espalier.models.structure import Structure
from espalier.progress import beats


@torch.no_grad()
def stretch_cosines(stream: BlockStream, samples: Tensor, span: int, *, after_norm: bool) -> Tensor:
    """Return the cosine between the hidden states before and after each stretch of ``span`` blocks.

    The hidden states of ``span + 1`` places are held, in memory or on disk, depending on the
    settings.

    The published code reads ``hidden_states`` of transformers, whose last entry is the output of
    the model's final norm. The norm scales each dimension by its own weight, which rotates the
    vector. The last stretch then has a lower cosine than its blocks give.

    Parameters
    ----------
    stream : the dense model
    samples : (num_samples, sequence_length), int64, calibration samples
    span : number of blocks of a stretch
    after_norm : use the last block's output after the final norm, as the published code does,
        instead of before it

    Returns
    -------
    Tensor
        (stretches,), float64: mean cosine over all tokens, by the first block of the stretch
    """
    activations = stream.start(samples)
    found = list[float]()
    # Hidden states before each stretch that has begun.
    before = deque([activations.copied()])
    for block_plan in beats(stream.model.plan.blocks, "comparing block"):
        index = block_plan.index
        with stream.block(index, following=index + 1) as block:
            activations.through(index, block)
        if index + 1 >= span:
            is_last = index + 1 == len(stream.model.plan.blocks)
            with (
                stream.final_norm() if is_last and after_norm else nullcontext(nn.Identity())
            ) as norm:
                found.append(_sum_of_cosines(before.popleft(), activations, norm) / samples.numel())
        if index + 1 + span <= len(stream.model.plan.blocks):
            before.append(activations.copied())
    return torch.tensor(found, dtype=torch.float64)


def _sum_of_cosines(before: Activations, behind: Activations, norm: nn.Module) -> float:
    """Return the sum of the cosines of all tokens, in float64.

    The hidden states after the stretch go through ``norm`` first.
    """
    total = 0.0
    for one, other in zip(before.batches(), behind.batches(), strict=True):
        total += float(
            torch.cosine_similarity(one.float(), norm(other).float(), dim=-1).double().sum()
        )
    return total


def likest(cosines: Tensor) -> int:
    """Return the first block of the stretch with the highest cosine; of equal ones, the first."""
    return int(cosines.argmax())


def pack_cosines(cosines: Tensor) -> bytes:
    """Serialise the cosines, float32."""
    return pack_tensors({COSINES: cosines.to(torch.float32).numpy()})


def unpack_cosines(blob: bytes) -> Tensor:
    """Return the cosines from a blob, float64."""
    return torch.from_numpy(unpack_tensors(blob)[COSINES].copy()).double()


def first_layer(model: OpenedModel, start: int) -> dict[str, Tensor]:
    """Return the initial values of the replacement layer: the first of the removed blocks.

    Returns
    -------
    dict
        float32 tensors by canonical name
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
    """Open the base without a stretch of blocks.

    Parameters
    ----------
    model : the base
    start : first block of the stretch
    span : number of blocks of the stretch
    layer : float32 tensors of the layer that replaces the stretch, by canonical name; they are
        rounded to the dtypes of the files. None for no layer
    """
    structure = Structure.whole(model.plan).with_blocks(
        stays(len(model.plan.blocks), start, span, layer is not None)
    )
    given: dict[str, Tensor] = {}
    for name, value in (layer or {}).items():
        path = model.family.parameter_path(name, start)
        assert path is not None
        given[path] = value.to(TORCH_DTYPES[model.checkpoint.tensors[path].dtype])
    return OpenedModel(model.directory, structure, given)


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
            f"pruning-ratio: {span} of {count(len(model.plan.blocks), 'block')} would have to go, one of"
            " them for the layer that is trained; lower it, or set replacement to 'none'"
        )
    whole = Structure.whole(model.plan)
    number = len(model.plan.blocks)
    # If all blocks have the same shape, one model stands for all.
    alike = len(set(whole.base)) == 1
    for start in range(1 if alike else number - span + 1):
        yield OpenedModel(model.directory, whole.with_blocks(stays(number, start, span, replaced)))
