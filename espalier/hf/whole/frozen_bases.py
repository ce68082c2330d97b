"""Frozen factors of adapters of which only the matrix between them is trained.

Every party computes the same ones from the base model and the run's seed, so they are never sent.
Their columns and rows are orthonormal. Parties with other processors may get other last bits, which
changes the update by as little.
"""

import numpy as np
import torch
from torch import Tensor

from espalier.hf.opening.opened_model import OpenedModel
from espalier.models.adapters import Adapter, AdapterPlan
from espalier.models.plan import block_key
from espalier.seeds import derive_seed

ITERATIONS = 4
"""Number of power iterations."""
EXTRA = 8
"""Number of vectors that are computed beyond the rank, for accuracy."""


def with_bases(
    model: OpenedModel, adapters: AdapterPlan, seed: int
) -> dict[str, dict[str, Tensor]]:
    """Return frozen A and B, and zero matrices between them: float32, by blob key and name."""
    tensors: dict[str, dict[str, Tensor]] = {}
    for index, adapter in adapters:
        purpose = f"bases/{adapter.linear.name}"
        generator = np.random.default_rng(derive_seed(seed, purpose, block=index))
        if adapters.bases == "weights":
            weight = model.checkpoint.read(adapter.linear.parameter).to(torch.float32)
            b, a = singular_vectors(weight, adapter.rank, generator)
        else:
            b, a = random_vectors(adapter, generator)
        block = tensors.setdefault(block_key(index), {})
        block |= adapter.named(b.contiguous(), a.contiguous())
        block[adapter.name_r] = torch.zeros(adapter.rank, adapter.rank)
    return tensors


def singular_vectors(
    weight: Tensor, rank: int, generator: np.random.Generator
) -> tuple[Tensor, Tensor]:
    """Return the first left and right singular vectors of a matrix, nearly.

    Source: Halko, Martinsson & Tropp 2011, "Finding Structure with Randomness", algorithms 4.4 and
    5.1. In each left vector the entry of the largest magnitude is positive.

    Parameters
    ----------
    weight : (out, in), float32

    Returns
    -------
    tuple of Tensor
        B (out, rank) with orthonormal columns, and A (rank, in) with orthonormal rows, float32.
    """
    width = min(rank + EXTRA, *weight.shape)
    start = generator.standard_normal((weight.shape[1], width)).astype(np.float32)
    basis = torch.linalg.qr(weight @ torch.from_numpy(start)).Q
    for _ in range(ITERATIONS):
        basis = torch.linalg.qr(weight @ torch.linalg.qr(weight.T @ basis).Q).Q
    u, _, vh = torch.linalg.svd((basis.T @ weight).to(torch.float64), full_matrices=False)
    left = basis.to(torch.float64) @ u[:, :rank]
    signs = left.gather(0, left.abs().argmax(dim=0, keepdim=True)).sign()
    return (left * signs).to(torch.float32), (vh[:rank] * signs.T).to(torch.float32)


def random_vectors(adapter: Adapter, generator: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Return random B (out, rank) and A (rank, in) with orthonormal columns and rows, float32."""
    vectors = []
    for features in adapter.linear.shape:
        values = torch.from_numpy(generator.standard_normal((features, adapter.rank)))
        vectors.append(torch.linalg.qr(values).Q.to(torch.float32))
    return vectors[0], vectors[1].T
