"""Cache of quantised models on a node.

Each model and quantisation has a folder, ``<cache_folder>/<key>``, with a file for each matrix: the
SHA-256 of its name and content, then safetensors.

Covers:

- Other users of the machine cannot read the cache (owner-only permissions).
- A file appears complete or not at all (atomic rename).
- Of two processes that need a matrix, one quantises it (a lock that ends with its process).
- A damaged file is detected by its hash and created again.
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
from safetensors.torch import load, save

from espalier.hf.files.tensor_pieces import pieces
from espalier.hf.nf4.blocks import BLOCK
from espalier.hf.nf4.checkpoint import stored_in_nf4
from espalier.hf.nf4.matrices import Nf4Matrix, bitsandbytes, quantise, require_quantisable
from espalier.hf.opening.opened_model import OpenedModel
from espalier.models.plan import LinearPlan
from espalier.progress import report_each
from espalier.storage.atomic import write_bytes
from espalier.storage.client_state import marked_folder
from espalier.storage.directory_lock import LOCK, OWNER_ONLY_FILE, in_turn

VERSION = 3
"""Version of the file layout and of the quantisation; part of the key."""


def quantised_linears(
    model: OpenedModel, device: torch.device, cache_folder: Path | None
) -> Iterator[tuple[LinearPlan, Nf4Matrix]]:
    """Yield the matrices of all blocks in NF4, in order, from the node's cache if possible.

    If the model's files hold all matrices in NF4, these are yielded unchanged: nothing is quantised
    or cached, and the files determine whether the scales are quantised. Matrices that were cut,
    scaled or replaced are not stored in NF4. Raises InputError if the folder is not writable, the
    model's files are damaged, or a matrix has rows that are not a whole number of blocks.

    Parameters
    ----------
    model : source of the weights
    device : device of the result
    cache_folder : cache of the node; None quantises every time
    """
    require_quantisable(model.plan)
    linears = model.plan.linears
    stored = [stored_in_nf4(model.checkpoint, linear.parameter) for linear in linears]
    folder = None
    if cache_folder is not None and None in stored:
        folder = marked_folder(cache_folder, cache_key(model))
        with suppress(FileNotFoundError):
            # The node deletes entries that were not used for its number of days.
            os.utime(folder / LOCK)
    for linear, codes in zip(report_each(linears, "loading matrix"), stored, strict=True):
        if codes is not None and None not in stored:
            yield linear, codes[0].matrix(codes[1], device)
        elif folder is None:
            yield linear, _quantised(model, linear, device)
        else:
            yield linear, _cached(model, linear, device, folder)


def cache_key(model: OpenedModel) -> str:
    """Return the SHA-256 of everything that determines the bits.

    That is the model, the quantisation, and the version of bitsandbytes, which has the tables.
    """
    parts = [VERSION, model.sha256, "nf4", BLOCK, bitsandbytes().__version__]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _quantised(model: OpenedModel, linear: LinearPlan, device: torch.device) -> Nf4Matrix:
    return quantise(pieces(model.checkpoint, linear.parameter), linear.shape, device)


def _cached(
    model: OpenedModel, linear: LinearPlan, device: torch.device, folder: Path
) -> Nf4Matrix:
    path = folder / linear.parameter
    data = _read(path)
    if data is None:
        with in_turn(folder):
            # Another process may have written the file while this one waited for the lock.
            data = _read(path)
            if data is None:
                data = save(_quantised(model, linear, device).tensors)
                # Unfinished files come from killed processes, because this process holds the lock.
                for unfinished in folder.glob(f".{path.name}.*"):
                    unfinished.unlink()
                write_bytes(path, _digest(path.name, data) + data, OWNER_ONLY_FILE)
    tensors = {name: tensor.to(device) for name, tensor in load(data).items()}
    return Nf4Matrix(linear.shape, **tensors)


def _read(path: Path) -> bytes | None:
    """Return the content of a file without its hash; None if it is missing or damaged."""
    with suppress(OSError), open(path, "rb") as file:
        digest = file.read(hashlib.sha256().digest_size)
        data = file.read()
        if digest == _digest(path.name, data):
            return data
    return None


def _digest(name: str, data: bytes) -> bytes:
    # The hash includes the name, so that matrices cannot be exchanged unnoticed.
    digest = hashlib.sha256(name.encode())
    digest.update(data)
    return digest.digest()
