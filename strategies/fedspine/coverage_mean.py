"""FedSpine's mean of one matrix over the devices that kept a row (equations 15 and 16)."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from espalier.models.adapters import Adapter
from espalier.models.groups import Cut, Groups
from espalier.models.structure import group_size, kind_of
from pruning_kernels.lora.factor_means import Divisor, KeptFactors, PrunedSide, coverage_mean
from pruning_kernels.lora.factors import Factors

SIDES: tuple[PrunedSide, PrunedSide] = ("rows", "columns")


def kept_map(groups: Groups, cut: Cut, index: int, adapter: Adapter) -> Tensor:
    """Return the rows or columns of a matrix of block ``index`` that remain after a cut: bool.

    A matrix is cut only on the side of its groups or channels.
    """
    name = adapter.linear.name
    kind, _ = kind_of(name)
    kept = ~cut[groups.at(index, kind)]
    return torch.from_numpy(np.repeat(kept, group_size(groups.plan, name, kind)))


def covered_mean(
    adapter: Adapter,
    clients: Sequence[KeptFactors],
    weights: Sequence[float],
    divisor: Divisor,
    last: KeptFactors | None,
) -> Factors:
    """Return the mean of the devices' updates of one matrix; see ``coverage_mean``."""
    _, side = kind_of(adapter.linear.name)
    return coverage_mean(
        clients, weights, SIDES[side], adapter.rank, adapter.scaling, divisor, last
    )


def part_of(adapter: Adapter, b: Tensor, a: Tensor, keep: Tensor) -> KeptFactors | None:
    """Return the part of the last global update on rows or columns ``keep``.

    It is None if the update is zero, or if ``keep`` is empty.
    """
    _, side = kind_of(adapter.linear.name)
    if not (bool(b.any()) and bool(keep.any())):
        return None
    own = (
        Factors(b[keep], a, adapter.scaling)
        if side == 0
        else Factors(b, a[:, keep], adapter.scaling)
    )
    return KeptFactors(own, keep)
