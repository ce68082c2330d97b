"""Matrices of a model in NF4, from the node's cache (``espalier/storage/tensor_cache.py``)."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from espalier.hf.files.tensor_pieces import pieces
from espalier.hf.nf4.blocks import BLOCK
from espalier.hf.nf4.checkpoint import stored_in_nf4
from espalier.hf.nf4.matrices import Nf4Matrix, bitsandbytes, quantise, require_quantisable
from espalier.hf.opening.opened_model import OpenedModel
from espalier.models.plan import LinearPlan
from espalier.progress import report_each
from espalier.storage.tensor_cache import TensorCache

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
    cache = None
    if cache_folder is not None and None in stored:
        cache = TensorCache(cache_folder, key_parts(model))
    for linear, codes in zip(report_each(linears, "loading matrix"), stored, strict=True):
        if codes is not None and None not in stored:
            yield linear, codes[0].matrix(codes[1], device)
        elif cache is None:
            yield linear, _quantised(model, linear, device)
        else:
            kept = cache.get(linear.parameter, partial(_tensors, model, linear, device))
            tensors = {name: tensor.to(device) for name, tensor in kept.items()}
            yield linear, Nf4Matrix(linear.shape, **tensors)


def key_parts(model: OpenedModel) -> list[Any]:
    """Return everything that determines the bits.

    That is the model, the quantisation, and the version of bitsandbytes, which has the tables.
    """
    return [VERSION, model.sha256, "nf4", BLOCK, bitsandbytes().__version__]


def _quantised(model: OpenedModel, linear: LinearPlan, device: torch.device) -> Nf4Matrix:
    return quantise(pieces(model.checkpoint, linear.parameter), linear.shape, device)


def _tensors(model: OpenedModel, linear: LinearPlan, device: torch.device) -> dict[str, Tensor]:
    return _quantised(model, linear, device).tensors
