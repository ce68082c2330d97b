"""Changes to the dense weights of a block before it runs or is exported.

An edit takes a weight in the dtype of the model's files and returns a tensor of the same shape and
dtype. A model that is evaluated while it streams therefore equals the exported model bit for bit.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from espalier.settings.run import RunSettings

WeightEdit = Callable[[Tensor], Tensor]
Edits = Callable[[int], Mapping[str, WeightEdit]]
"""Block index -> edits by canonical linear name; other linears stay unchanged."""

PruneMasks = Callable[[int], dict[str, Tensor]]
"""Block index -> prune masks by canonical linear name.

Masks are bool and have the shape of the weight. Linears without an entry are not pruned.
"""

Weights = Callable[[int], Mapping[str, Tensor]]
"""Block index -> whole weights by canonical linear name; other linears stay unchanged."""

KeptShares = Callable[[int], dict[str, Tensor]]
"""Block index -> factors by canonical linear name.

Factors are float32 in [0, 1] and have the shape of the weight.
"""

BlobEdits = Mapping[str, Callable[[Tensor, int, Mapping[str, bytes], RunSettings], Tensor]]
"""Edits by canonical linear name.

Each is a function of the weight, its block's index, the result's blobs by key, and the settings.
"""


def dense(_: int) -> dict[str, WeightEdit]:
    """Return no edits, which leaves the model dense."""
    return {}


def masked(prune_masks: PruneMasks) -> Edits:
    """Return edits that set masked weights to zero: ``W * (1 - M)`` (FedPrLLM step 5)."""

    def edits(index: int) -> dict[str, WeightEdit]:
        return {name: _Masking(mask) for name, mask in prune_masks(index).items()}

    return edits


def masked_and_scaled(prune_masks: PruneMasks, shares: KeptShares) -> Edits:
    """Return edits that zero masked weights and scale the others (FedPrLLM step 6).

    The result is ``W * (1 - M) * share``. The product is computed in float32 and rounded to the
    dtype of the weight. The reference code casts to float16 instead.
    """

    def edits(index: int) -> dict[str, WeightEdit]:
        factors = shares(index)
        return {name: _Masking(mask, factors[name]) for name, mask in prune_masks(index).items()}

    return edits


def replaced(weights: Weights) -> Edits:
    """Return edits that replace dense weights by other weights, cast to the dense dtype."""

    def edits(index: int) -> dict[str, WeightEdit]:
        return {name: _Replacement(weight) for name, weight in weights(index).items()}

    return edits


def edits_from(functions: BlobEdits, blobs: Mapping[str, bytes], run: RunSettings) -> Edits:
    """Return edits that depend on the blobs of a result."""

    def edit(name: str, index: int) -> WeightEdit:
        return lambda weight: functions[name](weight, index, blobs, run)

    return lambda index: {name: edit(name, index) for name in functions}


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
