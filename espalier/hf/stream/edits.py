"""What is done to the dense weights of a block before it runs or is exported: the result of a method, as functions.

An edit takes a weight in the dtype of the model's files and returns one of the same shape and dtype, so a model that is
evaluated while it streams has the bits of the model that is exported.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

WeightEdit = Callable[[Tensor], Tensor]
Edits = Callable[[int], Mapping[str, WeightEdit]]
"""Block index -> edits by canonical linear name; a linear that is not named stays as it is."""

PruneMasks = Callable[[int], dict[str, Tensor]]
"""Block index -> prune masks by canonical linear name: bool, shaped like the weights; a missing one prunes nothing."""

Weights = Callable[[int], Mapping[str, Tensor]]
"""Block index -> whole weights by canonical linear name; a linear that is not named stays as it is."""

KeptShares = Callable[[int], dict[str, Tensor]]
"""Block index -> factor of each weight by canonical linear name: float32 in [0, 1], shaped like the weights."""


def dense(_: int) -> dict[str, WeightEdit]:
    """No edits: the dense model."""
    return {}


def masked(prune_masks: PruneMasks) -> Edits:
    """Set masked weights to zero: ``W * (1 - M)`` (FedPrLLM step 5)."""

    def edits(index: int) -> dict[str, WeightEdit]:
        return {name: _Masking(mask) for name, mask in prune_masks(index).items()}

    return edits


def masked_and_scaled(prune_masks: PruneMasks, shares: KeptShares) -> Edits:
    """Set masked weights to zero and shrink the others: ``W * (1 - M) * share`` (FedPrLLM step 6).

    The product is made in float32 and rounded to the weight's own dtype; the reference code casts to float16 instead.
    """

    def edits(index: int) -> dict[str, WeightEdit]:
        factors = shares(index)
        return {name: _Masking(mask, factors[name]) for name, mask in prune_masks(index).items()}

    return edits


def replaced(weights: Weights) -> Edits:
    """Put other weights in the place of the dense ones, in their dtype."""

    def edits(index: int) -> dict[str, WeightEdit]:
        return {name: _Replacement(weight) for name, weight in weights(index).items()}

    return edits


class _Replacement:
    def __init__(self, weight: Tensor) -> None:
        self._weight = weight

    def __call__(self, weight: Tensor) -> Tensor:
        return self._weight.to(weight.dtype)


class _Masking:
    def __init__(self, prune_mask: Tensor, factor: Tensor | None = None) -> None:
        self._prune_mask = prune_mask
        self._factor = factor

    @torch.no_grad()
    def __call__(self, weight: Tensor) -> Tensor:
        if self._factor is not None:
            weight = (weight.to(torch.float32) * self._factor).to(weight.dtype)
        return weight.masked_fill(self._prune_mask, 0)
