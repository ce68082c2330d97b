"""Write a pruned model as plain Hugging Face, and check what was written by loading it again."""

import shutil
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from espalier.errors import Mistake
from espalier.hf.files.checkpoint import INDEX, Checkpoint, ShardWriter
from espalier.hf.opening.disk_model import ReloadError, plain_model
from espalier.hf.opening.model_files import copy_beside
from espalier.hf.opening.opened import OpenedModel
from espalier.hf.stream.block_stream import (
    FLOAT16_REMEDY,
    BlockStream,
    run_through,
    windows_per_batch,
)
from espalier.hf.stream.edits import Edits
from espalier.hf.stream.logits import logits_at
from espalier.progress.beats import beats
from espalier.storage.atomic import replacing, write_bytes, write_json

CARD = "README.md"
"""What the Hugging Face hub shows of a model."""


class ExportError(RuntimeError):
    """The exported model is not what was to be exported."""


def export_edited(model: OpenedModel, edits: Edits, target: Path, card: str = "") -> None:
    """Write the model with edited weights; dtypes, shard names, configuration and tokenizer stay as they are.

    The directory appears whole or not at all; weights are read, edited and written one tensor at a time. ``card`` becomes its
    ``README.md``; an empty one is not written. Matrices that the model's files hold in NF4 are written in float32, and its
    configuration does not say then that they are quantised; nor that head and embedding are tied where the files hold both.

    Raises
    ------
    Mistake
        The file system refused.
    """
    with made_whole(target) as unfinished:
        for shard in model.checkpoint.shards:
            _write_shard(model, shard, unfinished / shard.name, edits)
        copy_beside(model.directory, unfinished, () if model.checkpoint.is_sharded else (INDEX,))
        if not model.is_as_stored:
            _describe_anew(model, unfinished)
        write_card(unfinished, card)


def _describe_anew(model: OpenedModel, folder: Path) -> None:
    """Write configuration and index of a model whose own files name its tensors, or tie its head, otherwise."""
    write_json(folder / "config.json", model.config)
    if (folder / INDEX).exists():
        weight_map = {name: stored.shard.name for name, stored in model.checkpoint.tensors.items()}
        total = sum(stored.num_bytes for stored in model.checkpoint.tensors.values())
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def write_card(folder: Path, card: str) -> None:
    """Write a model card, unless it is empty."""
    if card:
        write_bytes(folder / CARD, card.encode())


@contextmanager
def made_whole(target: Path) -> Iterator[Path]:
    """A directory to write in, which takes the place of ``target`` when all is written, and is not seen before.

    Raises
    ------
    Mistake
        The file system refused.
    """
    unfinished = target.with_name(f".{target.name}.unfinished")
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        yield unfinished
        shutil.rmtree(target, ignore_errors=True)
        unfinished.rename(target)
    except OSError as error:
        raise Mistake(
            f"cannot write {target}: {error.strerror or error}; free the disk and resume the run"
        ) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _write_shard(model: OpenedModel, shard: Path, target: Path, edits: Edits) -> None:
    stored = {
        name: tensor for name, tensor in model.checkpoint.tensors.items() if tensor.shard == shard
    }
    specs = {
        name: (tensor.dtype, tensor.shape, tensor.stop - tensor.start)
        for name, tensor in stored.items()
    }
    with replacing(target) as file:
        writer = ShardWriter(file, specs, {"format": "pt"})
        for name, value in edited_tensors(model, specs, edits, "writing"):
            writer.write(name, bits_of(value).numpy().data)


def edited_tensors(
    model: OpenedModel, names: Collection[str], edits: Edits, doing: str = "reading"
) -> Iterator[tuple[str, Tensor]]:
    """Tensors of the model as they are to be exported, one at a time; a block's edits are made once for its tensors.

    ``doing`` is what is done with them, for those who hear the beats.
    """
    owner = {
        linear.parameter: (block.index, linear.name)
        for block in model.plan.blocks
        for linear in block.linears
    }
    block_in_hand = -1
    block_edits = edits(0)
    for name in beats(names, f"{doing} tensor"):
        value = model.checkpoint.read(name)
        if name in owner:
            index, linear = owner[name]
            if index != block_in_hand:
                block_in_hand = index
                block_edits = edits(index)
            if linear in block_edits:
                value = block_edits[linear](value)
                require_finite(name, value)
        yield name, value


def require_finite(name: str, value: Tensor) -> None:
    """Refuse a tensor of a result that holds NaN or infinity.

    Raises
    ------
    Mistake
        It names the tensor, and float16 if its numbers end there.
    """
    if value.is_floating_point() and not bool(value.isfinite().all()):
        half = (
            "; the base's files hold it in float16, which overflows beyond 65504: name a base in"
            " bfloat16 or float32"
        )
        remedy = (
            half
            if value.dtype == torch.float16
            else "; if it was trained, lower training.learning-rate"
        )
        raise Mistake(
            f"the result's tensor {name} holds NaN or infinity, and is no model that works{remedy}"
        )


def bits_of(value: Tensor) -> Tensor:
    """The bytes of a tensor, flat, uint8."""
    return value.contiguous().view(-1).view(torch.uint8)


@torch.no_grad()
def check_export(
    stream: BlockStream, edits: Edits, target: Path, windows: Tensor, reload_with: str
) -> None:
    """Reload an exported model and compare its logits and tensors with what was meant.

    Parameters
    ----------
    stream : the dense model
    windows : (windows, tokens), int64, a few windows of public text
    reload_with : how plain ``from_pretrained`` loads it: ``streamed`` leaves its weights in the files and reads each module's
        when the module computes; ``transformers`` loads all of them into memory

    Raises
    ------
    ExportError
        Logits differ by more than the computing dtype explains, or a tensor is not the (edited) dense one.
    """
    check_logits(stream, edits, target, windows, reload_with)
    _check_tensors(stream.model, edits, target)


def check_logits(
    stream: BlockStream, edits: Edits, target: Path, windows: Tensor, reload_with: str
) -> None:
    """The first half of ``check_export``, for an export whose tensors are shaped otherwise."""
    dtype = stream.computing.dtype
    device = stream.computing.device
    reloaded = reloaded_model(AutoModelForCausalLM, target, dtype, device, reload_with)
    found = whole_logits(reloaded, windows.to(device))
    require_close(found, logits_of(stream, windows, edits), dtype, target)


def reloaded_model(
    auto_class: Any,
    target: Path,
    dtype: torch.dtype,
    device: torch.device,
    reload_with: str,
    **given: Any,
) -> Any:
    """Load what was written as ``plain_model`` does.

    Raises
    ------
    ExportError
        A tensor is missing in it.
    """
    try:
        return plain_model(auto_class, target, dtype, device, reload_with, **given)
    except ReloadError as error:
        raise ExportError(f"{target}: {error}; the export is not usable") from error


def require_close(
    found: Iterable[Tensor], expected: Iterable[Tensor], dtype: torch.dtype, target: Path
) -> None:
    """Compare logits of what was exported with those that were meant, piece by piece.

    Raises
    ------
    ExportError
        They differ by more than the computing dtype explains, or the expected ones are not finite.
    """
    meant = _Watched(expected)
    difference = relative_difference(found, meant)
    if not meant.finite:
        is_half = dtype == torch.float16
        half = f"float16 overflows beyond 65504: {FLOAT16_REMEDY}; " if is_half else ""
        raise ExportError(
            f"{target}: the result gives logits that are NaN or infinite, and is no model that"
            f" works; {half}if it was trained, lower training.learning-rate"
        )
    if not difference <= tolerance(dtype):
        raise ExportError(
            f"{target}: logits of the reloaded model differ by {difference:.3g} of the largest; the"
            " export is not usable"
        )


class _Watched:
    """Pieces of logits that notes whether all pieces taken so far are finite."""

    def __init__(self, pieces: Iterable[Tensor]) -> None:
        self._pieces = pieces
        self.finite = True

    def __iter__(self) -> Iterator[Tensor]:
        for piece in self._pieces:
            self.finite &= bool(piece.isfinite().all())
            yield piece


def tolerance(dtype: torch.dtype) -> float:
    """Return the difference of logits that rounding in the computing dtype explains, relative to the largest."""
    return 1e-4 if dtype == torch.float32 else 5e-2


def relative_difference(found: Iterable[Tensor], expected: Iterable[Tensor]) -> float:
    """Return the largest difference of logits, relative to the largest expected one or 1; NaN if one is not a number."""
    differences = [0.0]
    sizes = [1.0]
    for one, other in zip(found, expected, strict=True):
        differences.append((one.float() - other.float()).abs().max().item())
        sizes.append(other.float().abs().max().item())
    # Unlike max(), these keep NaN.
    return (torch.tensor(differences).max() / torch.tensor(sizes).max()).item()


def logits_of(stream: BlockStream, windows: Tensor, edits: Edits) -> Iterator[Tensor]:
    """Logits of an edited model in pieces of tokens, (tokens, vocabulary)."""
    return stream.logits(run_through(stream, windows, edits))


def whole_logits(whole: Any, windows: Tensor) -> Iterator[Tensor]:
    """Logits of a model in memory, in the same pieces."""
    for batch in windows.split(windows_per_batch(windows.shape[1])):
        yield from logits_at(whole, batch, None, torch.ones_like(batch, dtype=torch.bool))


def _check_tensors(model: OpenedModel, edits: Edits, target: Path) -> None:
    """Every tensor of the export is, bit for bit, the dense one or the edited one."""
    written = Checkpoint(target)
    for name, expected in edited_tensors(model, model.checkpoint.tensors, edits, "checking"):
        if name not in written.tensors or not torch.equal(
            bits_of(written.read(name)), bits_of(expected)
        ):
            raise ExportError(
                f"{target}: {name} is not what was to be exported; the export is not usable"
            )
