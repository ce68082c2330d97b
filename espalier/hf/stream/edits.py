"""Changes to the dense weights of a block before it runs or is exported.

An edit takes a weight in the dtype of the model's files and returns a tensor of the same shape and
dtype. A model that is evaluated while it streams therefore equals the exported model bit for bit.
"""

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from espalier.settings.run import RunSettings

WeightEdit = Callable[[Tensor], Tensor]
Edits = Callable[[int], Mapping[str, WeightEdit]]
"""Block index -> edits by canonical linear name; other linears stay unchanged."""

BlockTensors = Callable[[int], Mapping[str, Tensor]]
"""Block index -> a tensor in the shape of the weight by canonical linear name.

Linears without an entry stay unchanged.
"""

BlobEdits = Mapping[str, Callable[[Tensor, int, Mapping[str, bytes], RunSettings], Tensor]]
"""Edits by canonical linear name.

Each is a function of the weight, its block's index, the result's blobs by key, and the settings.
"""


def dense(_: int) -> dict[str, WeightEdit]:
    """Return no edits, which leaves the model dense."""
    return {}


def masked(prune_masks: BlockTensors, shares: BlockTensors | None = None) -> Edits:
    """Return edits that zero masked weights and, with ``shares``, scale the others.

    They give ``W * (1 - M)`` (FedPrLLM step 5) or ``W * (1 - M) * share`` (step 6). Masks are bool.
    Shares are float32 in [0, 1]; the product is computed in float32 and rounded to the dtype of the
    weight. The reference code casts to float16 instead.
    """

    def edits(index: int) -> dict[str, WeightEdit]:
        factors = shares(index) if shares else {}
        return {
            name: partial(_mask, mask, factors.get(name))
            for name, mask in prune_masks(index).items()
        }

    return edits


@torch.no_grad()
def _mask(prune_mask: Tensor, factor: Tensor | None, weight: Tensor) -> Tensor:
    if factor is not None:
        # Scaled in float32 and rounded once, to the dtype of the files.
        weight = (weight.to(torch.float32) * factor).to(weight.dtype)
    return weight.masked_fill(prune_mask, 0)


def replaced(weights: BlockTensors) -> Edits:
    """Return edits that replace dense weights by other weights, cast to the dense dtype."""
    return lambda index: {
        name: partial(_cast, new_weight) for name, new_weight in weights(index).items()
    }


def _cast(new_weight: Tensor, weight: Tensor) -> Tensor:
    return new_weight.to(weight.dtype)


def edits_from(functions: BlobEdits, blobs: Mapping[str, bytes], run: RunSettings) -> Edits:
    """Return edits that depend on the blobs of a result."""

    def edit(name: str, index: int) -> WeightEdit:
        return lambda weight: functions[name](weight, index, blobs, run)

    return lambda index: {name: edit(name, index) for name in functions}
