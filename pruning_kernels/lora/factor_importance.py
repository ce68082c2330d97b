"""Importance of a device's LoRA modules relative to other devices, I(B_total).

Source: FedSpine section 4.3, equations 13 and 14. Equation 14 adds two terms. The first is about
1e-10 and the second about 1, so the first one would have no effect. Here each is divided by its
mean over the devices of the round before the sum. According to the paper's footnote A leads to the
same first term as B. This holds for the signed sum, ``tr(B^T gB) = tr(A gA^T)``, and not for the
squares.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from torch import Tensor

from pruning_kernels.lora.factors import Factors, as_float64, singular_values


@dataclass(frozen=True)
class Terms:
    """Both terms of one device.

    Raises
    ------
    ValueError
        A term is not a finite number of at least 0.
    """

    taylor: float
    """Sum of ``(B gB)^2`` over the entries of B of all modules (equations 9 and 13)."""
    spectral: float
    """Mean over modules of the sum of singular values of ``s B A``; the paper uses one module."""

    def __post_init__(self) -> None:
        for name, value in (("taylor", self.taylor), ("spectral", self.spectral)):
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(
                    f"the {name} term of an importance has to be a finite number of at least 0, got"
                    f" {value}"
                )


def taylor_term(b: Tensor, gradient: Tensor) -> float:
    """Return the sum of ``(B gB)^2`` of one module in one step, computed in float64.

    Parameters
    ----------
    b : (out_features, rank), any float dtype
    gradient : gradient of the loss with respect to ``b``, before clipping

    Raises
    ------
    NotFiniteError
        One of them has NaN or infinity.
    ValueError
        Their shapes differ.
    """
    if b.shape != gradient.shape:
        raise ValueError(
            f"a gradient is shaped like its factor, {tuple(b.shape)}, got {tuple(gradient.shape)}"
        )
    return float((as_float64(b) * as_float64(gradient)).square().sum())


def spectral_term(modules: Sequence[Factors]) -> float:
    """Return the mean over modules of the sum of their updates' singular values.

    No dense matrix is formed.

    Raises
    ------
    ValueError
        There is no module.
    NotFiniteError
        A factor has NaN or infinity.
    """
    if not modules:
        raise ValueError("a device without LoRA modules has no spectral term")
    return fmean(float(singular_values(module).double().sum()) for module in modules)


def comparable(terms: Mapping[int, Terms]) -> dict[int, float]:
    """Return I(B_total) of each device of a round.

    Each term is divided by its mean over the devices, and both are added, so that the mean is 2. A
    term that is 0 at all devices, as both are before B is first trained, distinguishes no devices
    and counts as 1 at each.
    """
    totals = dict.fromkeys(terms, 0.0)
    for values in (
        {key: own.taylor for key, own in terms.items()},
        {key: own.spectral for key, own in terms.items()},
    ):
        # The sum of sorted values does not depend on the order of the devices.
        mean = sum(sorted(value / len(values) for value in values.values()))
        for device, value in values.items():
            totals[device] += value / mean if mean > 0 else 1.0
    return totals
