"""LLM-Streamline (Chen et al. 2025): which neighbouring blocks hardly change their input, and the model without them.

Blocks are compared by the cosine between the hidden states before the first and behind the last of a stretch, token by token
(section 2.2).
What takes their place is trained in ``espalier/training/replacement.py``.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from espalier.amounts import count
from espalier.errors import Mistake
from espalier.hf.files.dtypes import TORCH_DTYPES
from espalier.hf.opening.opened import OpenedModel
from espalier.hf.stream.block_stream import Activations, BlockStream
from espalier.hf.whole.trained_whole import stored_values
from espalier.messages.payload import pack_tensors, unpack_tensors
from espalier.methods.llm_streamline.contract import COSINES, layer_shapes
from espalier.models.plan import block_key
from espalier.models.structure import Structure
from espalier.progress.beats import beats


@torch.no_grad()
def stretch_cosines(stream: BlockStream, windows: Tensor, span: int, *, after_norm: bool) -> Tensor:
    """Compare the hidden states before and behind each stretch of ``span`` blocks.

    Hidden states of ``span + 1`` places are held, in memory or on disk as the computing says.

    The published code reads ``hidden_states`` of transformers, whose last entry lies behind the model's final norm. The norm
    scales each dimension by its own weight, which turns the vector: the last stretch then has a lower cosine than its blocks
    give.

    Parameters
    ----------
    windows : (windows, tokens), int64
    after_norm : take the last block's output behind the final norm, as the published code does, and not before it

    Returns
    -------
    (stretches,), float64: the mean cosine over all tokens, by the stretch's first block
    """
    activations = stream.start(windows)
    found = list[float]()
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
                found.append(_sum_of_cosines(before.popleft(), activations, norm) / windows.numel())
        if index + 1 + span <= len(stream.model.plan.blocks):
            before.append(activations.copied())
    return torch.tensor(found, dtype=torch.float64)


def _sum_of_cosines(before: Activations, behind: Activations, norm: nn.Module) -> float:
    """Sum the cosines of all tokens, in float64; what is behind goes through a norm first."""
    total = 0.0
    for one, other in zip(before.batches(), behind.batches(), strict=True):
        total += float(
            torch.cosine_similarity(one.float(), norm(other).float(), dim=-1).double().sum()
        )
    return total


def likest(cosines: Tensor) -> int:
    """The first block of the stretch that changes its input least; of several the first."""
    return int(cosines.argmax())


def pack_cosines(cosines: Tensor) -> bytes:
    """Serialise them, float32."""
    return pack_tensors({COSINES: cosines.to(torch.float32).numpy()})


def unpack_cosines(blob: bytes) -> Tensor:
    """Read them, float64."""
    return torch.from_numpy(unpack_tensors(blob)[COSINES].copy()).double()


def first_layer(model: OpenedModel, start: int) -> dict[str, Tensor]:
    """The layer that training begins with, the first of the blocks that go: float32, by canonical name."""
    key = block_key(start)
    return stored_values(model, {key: list(layer_shapes(model.plan.blocks[start]))})[key]


def stays(num_blocks: int, start: int, span: int, replaced: bool) -> list[int]:
    """Blocks of the base that are left; where a layer comes in their place, it is the stretch's first block by its place."""
    return [*range(start + replaced), *range(start + span, num_blocks)]


def open_streamlined(
    model: OpenedModel, start: int, span: int, layer: Mapping[str, Tensor] | None
) -> OpenedModel:
    """Open what is left of a base.

    Parameters
    ----------
    start, span : the first of the blocks that go, and how many they are
    layer : what comes in their place, float32, by canonical name; it is rounded to the dtypes of the files. None: nothing does
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
    """The smaller models that the run can lead to, but for the layer, to see whether they can be made and written.

    Raises
    ------
    Mistake
        There are not so many blocks, beginning with a key of the method's table.
    """
    if span > len(model.plan.blocks):
        raise Mistake(
            f"share: {span} of {count(len(model.plan.blocks), 'block')} would have to go, one of"
            " them for the layer that is trained; lower it, or set replacement to 'none'"
        )
    whole = Structure.whole(model.plan)
    number = len(model.plan.blocks)
    alike = len(set(whole.base)) == 1
    for start in range(1 if alike else number - span + 1):
        yield OpenedModel(model.directory, whole.with_blocks(stays(number, start, span, replaced)))
