"""Cache of quantised models on a node.

Each model and quantisation has one file, ``<cache_folder>/<key>/model.safetensors``.

Covers:

- Other users of the machine cannot read the cache (owner-only permissions).
- A file appears complete or not at all (atomic rename).
- Two processes that need the same model quantise it once (a lock that ends with its process).
- A damaged file is detected by its hashes, matrix by matrix, and created again.
- A folder that was not used for as long as the node keeps the state of runs is deleted with that
  state.

Does not cover: an attacker who uses the owner's account and writes matching hashes.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from espalier.errors import EspalierError
from espalier.hf.files.checkpoint import Checkpoint, ShardWriter
from espalier.hf.files.tensor_pieces import pieces
from espalier.hf.nf4.checkpoint import held_in_nf4
from espalier.hf.nf4.matrices import (
    BLOCK,
    Nf4Matrix,
    bitsandbytes,
    quantise,
    require_quantisable,
    tables,
    tensor_sizes,
)
from espalier.hf.opening.opened import OpenedModel
from espalier.models.plan import LinearPlan
from espalier.progress import beats
from espalier.storage.atomic import replacing
from espalier.storage.client_state import marked_folder
from espalier.storage.directory_lock import LOCK, OWNER_ONLY_FILE, in_turn

VERSION = 2
"""Version of the file layout and of the quantisation; part of the key."""
HASH_BYTES = 32
TABLES = "tables"

Sizes = dict[str, tuple[str, tuple[int, ...], int]]


class _DamagedError(Exception):
    """Error for a file that does not hold what was written."""


def quantised_linears(
    model: OpenedModel, device: torch.device, cache_folder: Path | None
) -> Iterator[tuple[LinearPlan, Nf4Matrix]]:
    """Yield the matrices of all blocks in NF4, in order, from the node's cache if possible.

    If the cache turns out to be damaged in the middle, all matrices are yielded again from the
    first one. If the model's files hold all matrices in NF4, these are yielded unchanged: nothing
    is quantised or cached, and the files determine whether the scales are quantised.

    Parameters
    ----------
    model : source of the weights
    device : device of the result
    cache_folder : cache of the node; None quantises every time

    Yields
    ------
    tuple
        The plan of the linear, and its matrix

    Raises
    ------
    InputError
        The folder is not writable, the model's files are damaged, or a matrix has rows that are not
        a whole number of blocks.
    """
    require_quantisable(model.plan)
    if is_held_in_nf4(model):
        yield from _held(model, device)
        return
    if cache_folder is None:
        yield from _quantised(model, device)
        return
    folder = marked_folder(cache_folder, cache_key(model))
    with suppress(FileNotFoundError):
        # The node deletes entries that were not used for its number of days.
        os.utime(folder / LOCK)
    try:
        yield from _kept(model, folder, device)
    except _DamagedError:
        with in_turn(folder):
            # Another process may have created the entry while this one waited for the lock.
            try:
                yield from _kept(model, folder, device)
            except _DamagedError:
                yield from _quantised_and_kept(model, folder, device)


def cache_key(model: OpenedModel) -> str:
    """Return the SHA-256 of everything that determines the bits.

    That is the model, the quantisation, and the version of bitsandbytes.
    """
    parts = [
        VERSION,
        model.sha256,
        "nf4",
        BLOCK,
        bitsandbytes().__version__,
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def is_held_in_nf4(model: OpenedModel) -> bool:
    """Return whether the model's files hold all matrices of its blocks in NF4.

    Matrices that were cut, scaled or replaced do not count.
    """
    return all(
        held_in_nf4(model.checkpoint, linear.parameter)
        for block in model.plan.blocks
        for linear in block.linears
    )


def _held(model: OpenedModel, device: torch.device) -> Iterator[tuple[LinearPlan, Nf4Matrix]]:
    for block in beats(model.plan.blocks, "reading block"):
        for linear in block.linears:
            found = held_in_nf4(model.checkpoint, linear.parameter)
            assert found is not None
            yield linear, found[0].matrix(found[1], device)


def _quantised(model: OpenedModel, device: torch.device) -> Iterator[tuple[LinearPlan, Nf4Matrix]]:
    for block in beats(model.plan.blocks, "quantising block"):
        for linear in block.linears:
            yield (
                linear,
                quantise(
                    pieces(model.checkpoint, linear.parameter),
                    linear.shape,
                    device,
                ),
            )


def _quantised_and_kept(
    model: OpenedModel, folder: Path, device: torch.device
) -> Iterator[tuple[LinearPlan, Nf4Matrix]]:
    path = folder / "model.safetensors"
    # Unfinished files come from killed processes, because this process holds the lock.
    for unfinished in folder.glob(f".{path.name}.*"):
        unfinished.unlink()
    groups = _groups(model)
    specs = {
        f"{group}.{name}": spec
        for group, sizes in groups.items()
        for name, spec in _hashed(sizes).items()
    }
    with replacing(path, OWNER_ONLY_FILE) as file:
        writer = ShardWriter(file, specs, {"format": "pt"})
        _write(writer, TABLES, tables(torch.device("cpu")))
        for linear, matrix in _quantised(model, device):
            _write(writer, linear.parameter, matrix.tensors)
            yield linear, matrix


def _kept(
    model: OpenedModel, folder: Path, device: torch.device
) -> Iterator[tuple[LinearPlan, Nf4Matrix]]:
    groups = _groups(model)
    try:
        file = Checkpoint(folder)
        found = _read(file, TABLES, groups[TABLES])
        # The codes are valid only for these tables, which come from bitsandbytes.
        if any(
            not torch.equal(found[name], table)
            for name, table in tables(torch.device("cpu")).items()
        ):
            raise _DamagedError
        for block in model.plan.blocks:
            for linear in block.linears:
                tensors = _read(file, linear.parameter, groups[linear.parameter])
                yield (
                    linear,
                    Nf4Matrix(
                        linear.shape,
                        **{name: tensor.to(device) for name, tensor in tensors.items()},
                    ),
                )
    # The file does not exist or is not a safetensors file.
    except (EspalierError, OSError) as error:
        raise _DamagedError from error


def _groups(model: OpenedModel) -> dict[str, Sizes]:
    """Return the tensors of the file: lookup tables, and those of each matrix by parameter."""
    held: Sizes = {
        name: ("F32", tuple(table.shape), table.nbytes)
        for name, table in tables(torch.device("cpu")).items()
    }
    shapes = {
        linear.parameter: linear.shape for block in model.plan.blocks for linear in block.linears
    }
    return {TABLES: held} | {
        name: tensor_sizes(shape, double_quantisation=True) for name, shape in shapes.items()
    }


def _hashed(sizes: Sizes) -> Sizes:
    return sizes | {"sha256": ("U8", (HASH_BYTES,), HASH_BYTES)}


def _write(writer: ShardWriter, group: str, tensors: dict[str, Tensor]) -> None:
    # The hash includes the name, so that matrices cannot be exchanged unnoticed.
    digest = hashlib.sha256(group.encode())
    for name, tensor in tensors.items():
        data = _bytes(tensor)
        digest.update(data)
        writer.write(f"{group}.{name}", data)
    writer.write(f"{group}.sha256", digest.digest())


def _read(file: Checkpoint, group: str, sizes: Sizes) -> dict[str, Tensor]:
    """Read the tensors of a group on the CPU, and compare their bytes with the stored hash."""
    digest = hashlib.sha256(group.encode())
    tensors = {}
    for name, (dtype, shape, _) in _hashed(sizes).items():
        stored = file.tensors.get(f"{group}.{name}")
        if stored is None or (stored.dtype, stored.shape) != (dtype, shape):
            raise _DamagedError
        tensors[name] = file.read(f"{group}.{name}")
        if name != "sha256":
            digest.update(_bytes(tensors[name]))
    if bytes(_bytes(tensors.pop("sha256"))) != digest.digest():
        raise _DamagedError
    return tensors


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
