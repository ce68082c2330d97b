"""Bounded contributions of records: vectors of norm at most 1, as integers on a grid.

Integers add up exactly, in any order. Numbers are cut towards zero, so the grid never makes a norm
larger than the bound.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from pruning_kernels.fixed_point import RECORD_BITS

WITHIN = 2.0**RECORD_BITS - 1
"""Integer that stands for the bound; below 2^40, to make up for the rounding of norms."""


def normalised(vectors: Tensor) -> Tensor:
    """Return vectors, (records, numbers), divided by their L2 norms, on the grid, int64.

    A vector of zeros stays as it is. A vector that is not finite becomes zeros.
    """
    (scaled,) = _scaled({"": vectors}, None).values()
    return scaled


def clipped(parts: Mapping[str, Tensor], bound: float) -> dict[str, Tensor]:
    """Return the parts of one vector per record, scaled down to L2 norm ``bound``, int64.

    The integer 2^40 stands for ``bound``. The vector of a record is all parts together, and becomes
    zeros if it is not finite.

    Parameters
    ----------
    parts : (records, ...) each, by name
    bound : positive, so large that ``WITHIN`` divided by it is finite

    Raises
    ------
    ValueError
        The bound is too small, or not a number.
    """
    if not (bound > 0 and math.isfinite(WITHIN / bound)):
        raise ValueError(f"a bound of {bound} is too small")
    return _scaled(parts, bound)


def _scaled(parts: Mapping[str, Tensor], bound: float | None) -> dict[str, Tensor]:
    # Squares of float32 numbers neither overflow nor vanish in float64.
    flat = {name: part.flatten(1).double() for name, part in parts.items()}
    total = torch.stack([part.square().sum(dim=1) for part in flat.values()]).sum(dim=0)
    norms = total.sqrt()
    # One norm over all parts of a record, not one per part.
    divisor = norms if bound is None else norms.clamp(min=bound)
    # A vector of zeros has no direction and stays zero.
    factor = torch.where(divisor > 0, WITHIN / divisor, 0.0)
    usable = (torch.isfinite(norms) & torch.isfinite(factor))[:, None]
    return {
        # Truncate, not round: rounding up could lift the norm above the bound, which privacy relies
        # on.
        name: torch.where(usable, (part * factor[:, None]).trunc(), 0.0)
        .long()
        .view(parts[name].shape)
        for name, part in flat.items()
    }
