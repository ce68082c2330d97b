"""Frozen factors of adapters of which only the matrix between them is trained.

Every party computes the same ones from the base model and the run's seed, so they are never sent.
Their columns and rows are orthonormal. Computed in float64, they are the same to about float32
precision on all processors, except if two singular values of a matrix are equal in the first eight
digits or so: then any rotation of their vectors is as good, and what another processor computes is
another one.
"""

from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from espalier.hf.opening.opened_model import OpenedModel
from espalier.models.adapters import Adapter, AdapterPlan
from espalier.models.plan import block_key
from espalier.seeds import derive_seed
from espalier.storage.tensor_cache import TensorCache

VERSION = 1
"""Version of the computation; part of the cache's key."""
ITERATIONS = 4
"""Number of power iterations."""
EXTRA = 8
"""Number of vectors that are computed beyond the rank, for accuracy."""
NEARLY_ZERO = 1e-10
"""Fraction of the largest singular value up to which vectors would be rounding errors."""


def with_bases(
    model: OpenedModel, adapters: AdapterPlan, seed: int, cache_folder: Path | None = None
) -> dict[str, dict[str, Tensor]]:
    """Return frozen A and B, and zero matrices between them: float32, by blob key and name.

    Parameters
    ----------
    cache_folder : node's cache of frozen factors, which every message of a run needs; None computes
        them every time
    """
    tensors: dict[str, dict[str, Tensor]] = {}
    cache = None
    if cache_folder is not None:
        ranks = [[index, adapter.linear.name, adapter.rank] for index, adapter in adapters]
        parts = [VERSION, model.sha256, "bases", adapters.bases, seed, ranks]
        cache = TensorCache(cache_folder, parts)
    for index in sorted(adapters.blocks):
        make = partial(_factors, model, adapters, seed, index)
        block = make() if cache is None else cache.get(block_key(index), make)
        for adapter in adapters.blocks[index]:
            block[adapter.name_r] = torch.zeros(adapter.rank, adapter.rank)
        tensors[block_key(index)] = block
    return tensors


def _factors(model: OpenedModel, adapters: AdapterPlan, seed: int, index: int) -> dict[str, Tensor]:
    """Return the frozen factors of one block by canonical name."""
    factors: dict[str, Tensor] = {}
    for adapter in adapters.blocks[index]:
        purpose = f"bases/{adapter.linear.name}"
        generator = np.random.default_rng(derive_seed(seed, purpose, block=index))
        if adapters.bases == "weights":
            weight = model.checkpoint.read(adapter.linear.parameter)
            b, a = singular_vectors(weight, adapter.rank, generator)
        else:
            b, a = random_vectors(adapter, generator)
        factors |= adapter.named(b.contiguous(), a.contiguous())
    return factors


def singular_vectors(
    weight: Tensor, rank: int, generator: np.random.Generator
) -> tuple[Tensor, Tensor]:
    """Return the first left and right singular vectors of a matrix, nearly.

    Source: Halko, Martinsson & Tropp 2011, "Finding Structure with Randomness", algorithms 4.4 and
    5.1. In each left vector the entry of the largest magnitude is positive. A matrix of a lower
    rank has fewer vectors than ``rank``; random ones, orthogonal to these, take the other places.

    Parameters
    ----------
    weight : (out, in), floating-point

    Returns
    -------
    tuple of Tensor
        B (out, rank) with orthonormal columns, and A (rank, in) with orthonormal rows, float32.
    """
    weight = weight.to(torch.float64)
    width = min(rank + EXTRA, *weight.shape)
    start = torch.from_numpy(generator.standard_normal((weight.shape[1], width)))
    basis = torch.linalg.qr(weight @ start).Q
    for _ in range(ITERATIONS):
        basis = torch.linalg.qr(weight @ torch.linalg.qr(weight.T @ basis).Q).Q
    u, values, vh = torch.linalg.svd(basis.T @ weight, full_matrices=False)
    found = int((values[:rank] > NEARLY_ZERO * values[0]).sum())
    left, right = basis @ u[:, :found], vh[:found].T
    signs = _signs(left)
    left = _completed(left * signs, rank, generator)
    right = _completed(right * signs, rank, generator)
    return left.to(torch.float32), right.T.to(torch.float32)


def _completed(vectors: Tensor, number: int, generator: np.random.Generator) -> Tensor:
    """Return the orthonormal columns followed by random ones, up to ``number`` columns."""
    missing = number - vectors.shape[1]
    if not missing:
        return vectors
    drawn = torch.from_numpy(generator.standard_normal((len(vectors), missing)))
    # QR goes from left to right, so the given columns come first, except for their signs.
    more = torch.linalg.qr(torch.cat([vectors, drawn], dim=1)).Q[:, -missing:]
    return torch.cat([vectors, more * _signs(more)], dim=1)


def _signs(vectors: Tensor) -> Tensor:
    """Return the sign of the entry of the largest magnitude in each column."""
    return vectors.gather(0, vectors.abs().argmax(dim=0, keepdim=True)).sign()


def random_vectors(adapter: Adapter, generator: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Return random B (out, rank) and A (rank, in) with orthonormal columns and rows, float32."""
    vectors = []
    for features in adapter.linear.shape:
        values = torch.from_numpy(generator.standard_normal((features, adapter.rank)))
        vectors.append(torch.linalg.qr(values).Q.to(torch.float32))
    return vectors[0], vectors[1].T
