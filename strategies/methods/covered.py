"""FedSpine's mean of one matrix: a row counts with the devices that kept it (section 4.4, equations 15 and 16)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from espalier.modeling.structured.slices import kept_indices
from espalier.training.unit_importance import kind_of
from espalier.wire.adapters import Adapter
from espalier.wire.plan import ModelPlan
from espalier.wire.structure import COLUMNS, ROWS, Structure
from pruning_kernels.factor_means import Divisor, KeptFactors, PrunedSide, coverage_mean
from pruning_kernels.factors import Factors

SIDES: tuple[PrunedSide, PrunedSide] = ("rows", "columns")


def kept_map(plan: ModelPlan, structure: Structure, index: int, adapter: Adapter) -> Tensor:
    """Rows, or columns, of a matrix that a structure keeps: bool, one each.

    A matrix is cut on one side: that on which its groups or channels lie.
    """
    name = adapter.linear.name
    _, side = kind_of(name)
    kept = kept_indices(plan, structure, structure.blocks[index], name, (ROWS, COLUMNS)[side])
    found = torch.ones(adapter.linear.shape[side], dtype=torch.bool)
    if kept is not None:
        found[:] = False
        found[torch.tensor(kept)] = True
    return found


def covered_mean(
    adapter: Adapter, clients: Sequence[KeptFactors], weights: Sequence[float], divisor: Divisor, last: KeptFactors | None
) -> Factors:
    """The mean of devices' updates of one matrix; see ``coverage_mean``."""
    _, side = kind_of(adapter.linear.name)
    return coverage_mean(clients, weights, SIDES[side], adapter.rank, adapter.scaling, divisor, last)


def part_of(adapter: Adapter, b: Tensor, a: Tensor, keep: Tensor) -> KeptFactors | None:
    """What some devices still have of the last global update; None of one that is zero, and where nobody has any."""
    _, side = kind_of(adapter.linear.name)
    if not (bool(b.any()) and bool(keep.any())):
        return None
    own = Factors(b[keep], a, adapter.scaling) if side == 0 else Factors(b, a[:, keep], adapter.scaling)
    return KeptFactors(own, keep)
