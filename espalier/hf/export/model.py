"""Export of a pruned model as a plain Hugging Face model, and checks that reload it."""

import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from espalier.errors import InputError
from espalier.hf.files.checkpoint import (
    INDEX,
    SINGLE,
    Checkpoint,
    StoredTensor,
    bits_of,
    write_shard,
)
from espalier.hf.opening.disk_model import load_plain
from espalier.hf.opening.model_files import copy_other_files
from espalier.hf.opening.opened_model import OpenedModel
from espalier.hf.stream.block_stream import (
    FLOAT16_REMEDY,
    BlockStream,
    logits_at,
    run_through,
    samples_per_batch,
)
from espalier.hf.stream.edits import Edits
from espalier.progress import report_each
from espalier.storage.atomic import write_bytes, write_json

CARD = "README.md"
"""File that the Hugging Face hub shows as the model card."""


class ExportError(RuntimeError):
    """Error for an exported model that differs from the intended one."""


def export_edited(model: OpenedModel, edits: Edits, target: Path, card: str = "") -> None:
    """Write the model with edited weights.

    Dtypes, shard names, configuration and tokenizer stay the same, with two exceptions. Matrices
    that the model's files hold in NF4 are written in float32, and the configuration then does not
    say that they are quantised. If the files hold both a head and an embedding, the configuration
    does not say that they are tied.

    The directory is written atomically: it appears complete or not at all. Weights are read, edited
    and written one tensor at a time. Raises InputError if writing failed.

    Parameters
    ----------
    model : the dense model
    edits : changes to its weights
    target : directory to write
    card : content of ``README.md``; an empty string writes none
    """
    with replacing_folder(target) as unfinished:
        written = model.checkpoint.as_written
        specs = shard_by_shard(written, written.tensors)
        write_shards(specs, edited_tensors(model, specs, edits, "writing"), unfinished)
        # An index only fits sharded files, and the base's own only the tensors' names there.
        fits = model.is_as_stored and written.is_sharded
        copy_other_files(model.directory, unfinished, () if fits else (INDEX,))
        if not model.is_as_stored:
            write_json(unfinished / "config.json", model.config)
        write_card(unfinished, card)


def shard_by_shard(
    files: Checkpoint, tensors: Mapping[str, StoredTensor]
) -> dict[str, StoredTensor]:
    """Return tensors in the order in which they are written: that of the files' shards."""
    return dict(sorted(tensors.items(), key=lambda entry: files.shards.index(entry[1].shard)))


def write_shards(
    specs: Mapping[str, StoredTensor], tensors: Iterator[tuple[str, Tensor]], folder: Path
) -> None:
    """Write tensors as they arrive, shard by shard, and an index if there are several shards."""
    shards = list(dict.fromkeys(stored.shard for stored in specs.values()))
    for shard in shards:
        own = {name: stored for name, stored in specs.items() if stored.shard == shard}
        # The tensors arrive in the order of ``specs``.
        write_shard(folder / shard.name, own, tensors)
    if [shard.name for shard in shards] != [SINGLE]:
        total = sum(stored.num_bytes for stored in specs.values())
        weight_map = {name: stored.shard.name for name, stored in specs.items()}
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def write_card(folder: Path, card: str) -> None:
    """Write a model card unless it is empty."""
    if card:
        write_bytes(folder / CARD, card.encode())


@contextmanager
def replacing_folder(target: Path) -> Iterator[Path]:
    """Yield a temporary directory that replaces ``target`` when the context exits without error.

    InputError if writing failed.
    """
    # Next to the target, so that the rename stays within one file system.
    unfinished = target.with_name(f".{target.name}.unfinished")
    try:
        # A killed process may have left it behind.
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        yield unfinished
        # Only now is an older result removed.
        shutil.rmtree(target, ignore_errors=True)
        unfinished.rename(target)
    except OSError as error:
        raise InputError(
            f"cannot write {target}: {error.strerror or error}; choose another directory or free"
            " some space"
        ) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def edited_tensors(
    model: OpenedModel, names: Collection[str], edits: Edits, doing: str
) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors of the model as they are exported, and report progress: ``writing tensor``."""
    read = weight_reader(model, edits)
    for name in report_each(names, f"{doing} tensor"):
        yield name, read(name)


def weight_reader(model: OpenedModel, edits: Edits) -> Callable[[str], Tensor]:
    """Return a function that reads one tensor of the files and applies its edit."""
    owner = {
        linear.parameter: (block.index, linear.name)
        for block in model.plan.blocks
        for linear in block.linears
    }
    # Tensors are mostly read block by block.
    of_block = lru_cache(maxsize=1)(edits)

    def read(name: str) -> Tensor:
        checkpoint = model.checkpoint
        # The files of a mixture of experts have other names than its parameters.
        value = (checkpoint if name in checkpoint.tensors else checkpoint.as_written).read(name)
        index, linear = owner.get(name, (0, ""))
        # A tensor without an edit is copied bit by bit.
        if linear and (edit := of_block(index).get(linear)):
            value = edit(value)
            require_finite(name, value)
        return value

    return read


def require_finite(name: str, value: Tensor) -> None:
    """Raise InputError if a tensor of a result holds NaN or infinity."""
    if value.is_floating_point() and not bool(value.isfinite().all()):
        remedy = "if it was trained, lower training.learning-rate"
        if value.dtype == torch.float16:
            remedy = (
                "the base's files hold it in float16, which overflows beyond 65504: name a base in"
                " bfloat16 or float32"
            )
        raise InputError(
            f"the result's tensor {name} holds NaN or infinity, and does not work; {remedy}"
        )


@torch.no_grad()
def check_export(stream: BlockStream, edits: Edits, target: Path, samples: Tensor) -> None:
    """Reload an exported model and compare its logits and tensors with the intended ones.

    Plain ``from_pretrained`` loads it, and reads its weights module by module. Raises ExportError
    if logits differ by more than rounding in the compute dtype explains, or a tensor is not the
    (edited) dense one.

    Parameters
    ----------
    stream : the dense model
    edits : changes to its weights
    target : directory of the export
    samples : (num_sequences, sequence_length), int64, a few sequences of the evaluation text
    """
    # Logits first: they also find faults in configuration and code.
    check_logits(stream, edits, target, samples)
    written = stream.model.checkpoint.as_written.tensors
    require_written(target, edited_tensors(stream.model, written, edits, "checking"))


def check_logits(stream: BlockStream, edits: Edits, target: Path, samples: Tensor) -> None:
    """Compare only the logits; for exports whose tensors have other shapes than the dense model's.

    Parameters and errors are those of ``check_export``.
    """
    dtype = stream.computing.dtype
    device = stream.computing.device
    found = whole_logits(reloaded(target, dtype, device), samples.to(device))
    require_close(found, logits_of(stream, samples, edits), dtype, target)


def reloaded(
    directory: Path, dtype: torch.dtype, device: torch.device, num_labels: int | None = None
) -> Any:
    """Load a model with plain transformers, and require that no tensor is missing.

    The weights stay in the files. Parameters are those of ``load_plain``. Raises ExportError if a
    tensor is missing, other than those of an encoder's new classification head.
    """
    model = OpenedModel(directory)
    whole, loading = load_plain(model, dtype, device, num_labels)
    # A new head is in no file.
    new = () if num_labels is None else tuple(model.family.head_linears.values())
    missing = (name for name in loading["missing_keys"] if name.rpartition(".")[0] not in new)
    if first := min(missing, default=""):
        raise ExportError(
            f"{directory}: transformers finds no tensor {first} in it; the model is not usable"
        )
    return whole


def require_close(
    found: Iterable[Tensor], expected: Iterable[Tensor], dtype: torch.dtype, target: Path
) -> None:
    """Compare the logits of an exported model with the intended ones, piece by piece.

    Raises ExportError if they differ by more than rounding in ``dtype`` explains, or are not
    finite.
    """
    finite: list[bool] = []

    def watched() -> Iterator[Tensor]:
        for piece in expected:
            finite.append(bool(piece.isfinite().all()))
            yield piece

    # ``expected`` is a stream, so finiteness is watched while it is compared.
    difference = relative_difference(found, watched())
    if not all(finite):
        is_half = dtype == torch.float16
        half = f"float16 overflows beyond 65504: {FLOAT16_REMEDY}; " if is_half else ""
        raise ExportError(
            f"{target}: the result gives logits that are NaN or infinite, and does not"
            f" work; {half}if it was trained, lower training.learning-rate"
        )
    # Written as "not <=" so that NaN is refused too.
    if not difference <= tolerance(dtype):
        raise ExportError(
            f"{target}: logits of the reloaded model differ by {difference:.3g} of the largest; the"
            " export is not usable"
        )


def tolerance(dtype: torch.dtype) -> float:
    """Return the difference of logits that rounding explains, relative to the largest logit."""
    return 1e-4 if dtype == torch.float32 else 5e-2


def relative_difference(found: Iterable[Tensor], expected: Iterable[Tensor]) -> float:
    """Return the largest difference of logits, relative to the largest expected logit or 1.

    The result is NaN if a logit is NaN.
    """
    differences = [0.0]
    sizes = [1.0]
    for one, other in zip(found, expected, strict=True):
        differences.append((one.float() - other.float()).abs().max().item())
        sizes.append(other.float().abs().max().item())
    # torch's max propagates NaN; Python's max() does not.
    return (torch.tensor(differences).max() / torch.tensor(sizes).max()).item()


def logits_of(stream: BlockStream, samples: Tensor, edits: Edits) -> Iterator[Tensor]:
    """Return the logits of an edited model in pieces, (tokens, vocab_size) each."""
    return stream.logits(run_through(stream, samples, edits))


def whole_logits(whole: Any, samples: Tensor) -> Iterator[Tensor]:
    """Yield the logits of a model in memory, in the pieces of ``logits_of``."""
    for batch in samples.split(samples_per_batch(samples.shape[1])):
        yield from logits_at(whole, batch, None, torch.ones_like(batch, dtype=torch.bool))


def require_written(target: Path, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Compare tensors, bit for bit, with those of an exported model.

    Raises ExportError if a tensor is missing or differs.
    """
    written = Checkpoint(target)
    # Bits, because NaN differs from itself, and -0.0 equals 0.0.
    for name, expected in tensors:
        if name not in written.tensors or not torch.equal(
            bits_of(written.read(name)), bits_of(expected)
        ):
            raise ExportError(
                f"{target}: {name} is not the value to export; the export is not usable"
            )
