"""FedSpine's mean of one matrix: a row counts with the devices that kept it (section 4.4, equations 15 and 16)."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from espalier.training.unit_importance import kind_of
from espalier.wire.adapters import Adapter
from espalier.wire.cut_units import Cut, CutUnits
from espalier.wire.structure import unit_size
from pruning_kernels.factor_means import Divisor, KeptFactors, PrunedSide, coverage_mean
from pruning_kernels.factors import Factors

SIDES: tuple[PrunedSide, PrunedSide] = ("rows", "columns")


def kept_map(units: CutUnits, cut: Cut, index: int, adapter: Adapter) -> Tensor:
    """Rows, or columns, of a matrix of block ``index`` that stay when units are cut: bool, one each.

    A matrix is cut on one side: that on which its groups or channels lie.
    """
    name = adapter.linear.name
    kind, _ = kind_of(name)
    return torch.from_numpy(
        ~np.repeat(units.by_block(cut)[index][kind], unit_size(units.plan, name, kind))
    )


def covered_mean(
    adapter: Adapter,
    clients: Sequence[KeptFactors],
    weights: Sequence[float],
    divisor: Divisor,
    last: KeptFactors | None,
) -> Factors:
    """The mean of devices' updates of one matrix; see ``coverage_mean``."""
    _, side = kind_of(adapter.linear.name)
    return coverage_mean(
        clients, weights, SIDES[side], adapter.rank, adapter.scaling, divisor, last
    )


def part_of(adapter: Adapter, b: Tensor, a: Tensor, keep: Tensor) -> KeptFactors | None:
    """What some devices still have of the last global update; None of one that is zero, and where nobody has any."""
    _, side = kind_of(adapter.linear.name)
    if not (bool(b.any()) and bool(keep.any())):
        return None
    own = (
        Factors(b[keep], a, adapter.scaling)
        if side == 0
        else Factors(b, a[:, keep], adapter.scaling)
    )
    return KeptFactors(own, keep)
