"""Mask generator of SFT-P (section 3.2).

A network that all clients share maps a client's own embedding to the logits of all gates.
"""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn

from espalier.hf.structured.residual_gates import Gate
from espalier.models.adapters import Tensors
from espalier.models.mask_generator import (
    CODES,
    GENERATOR_KEY,
    NORM,
    NORM_BIAS,
    TRUNK,
    TRUNK_BIAS,
    GeneratorShape,
    head_name,
)
from espalier.models.plan import ModelPlan
from espalier.models.structure import RESIDUAL_KINDS
from espalier.seeds import derive_seed

EMBEDDING_STD = 0.1
"""Standard deviation of initial embeddings and codes; the paper does not give it.

Both have the same, so that neither dominates the other.
"""
HEAD_STD = 0.02
"""Standard deviation of the heads' initial values.

It is small, so that at first the constant decides and nearly all residual dimensions are active.
"""


def first_generator(
    plan: ModelPlan, shape: GeneratorShape, seed: int
) -> dict[str, dict[str, Tensor]]:
    """Return the generator's initial values: float32, by blob key and canonical name.

    Every party computes the same values from the run's seed.
    """
    tensors: dict[str, dict[str, Tensor]] = {}
    for key, own in shape.shapes(plan).items():
        for name, size in own.items():
            generator = np.random.default_rng(derive_seed(seed, f"generator/{key}/{name}"))
            tensors.setdefault(key, {})[name] = _first(name, size, generator)
    return tensors


def _first(name: str, size: tuple[int, ...], generator: np.random.Generator) -> Tensor:
    if name == NORM:
        return torch.ones(size)
    if name in (NORM_BIAS, TRUNK_BIAS):
        return torch.zeros(size)
    # The initialisation of torch.nn.Linear.
    if name == TRUNK:
        bound = size[1] ** -0.5
        return torch.from_numpy(generator.uniform(-bound, bound, size).astype(np.float32))
    std = EMBEDDING_STD if name == CODES else HEAD_STD
    return torch.from_numpy(generator.normal(0.0, std, size).astype(np.float32))


def first_embedding(shape: GeneratorShape, seed: int, client: int | None) -> Tensor:
    """Return a client's initial embedding, (embedding,), float32.

    With ``client = None`` it is the constant that replaces embeddings if clients are not
    distinguished.
    """
    name = "embedding" if client is None else f"embedding/{client}"
    generator = np.random.default_rng(derive_seed(seed, name))
    return torch.from_numpy(
        generator.normal(0.0, EMBEDDING_STD, shape.embedding).astype(np.float32)
    )


def gate_logits(
    plan: ModelPlan,
    shape: GeneratorShape,
    tensors: Tensors | Mapping[str, Mapping[str, nn.Parameter]],
    embedding: Tensor,
) -> dict[Gate, Tensor]:
    """Return the logits of all gates, without the constant that is added to them.

    Each is (dimensions,), float32 (equations 10 and 11).

    Parameters
    ----------
    tensors : tensors of the generator, by blob key and canonical name
    embedding : (embedding,), on their device
    """
    common = tensors[GENERATOR_KEY]
    codes = common[CODES]
    inputs = torch.cat([embedding.expand(len(codes), -1), codes], dim=1)
    hidden = nn.functional.linear(inputs, common[TRUNK], common[TRUNK_BIAS])
    hidden = nn.functional.gelu(
        nn.functional.layer_norm(hidden, hidden.shape[1:], common[NORM], common[NORM_BIAS])
    )
    gates = [(block.index, kind) for block in plan.blocks for kind in RESIDUAL_KINDS]
    return {
        (index, kind): tensors[shape.head_key(index)][head_name(kind)] @ own
        for (index, kind), own in zip(gates, hidden, strict=True)
    }
