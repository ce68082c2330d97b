"""What a device's LoRA modules are worth beside those of other devices: I(B_total) (FedSpine section 4.3, equations 13 and 14).

Equation 14 adds two terms, of which the first is about 1e-10 and the second about 1, so that the first one never counts. Here
each is divided by its mean over the devices of the round before they are added. The paper's footnote says that A leads to the
same first term as B; that holds for the signed sum, ``tr(B^T gB) = tr(A gA^T)``, and not for the squares.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from torch import Tensor

from pruning_kernels.factors import Factors, as_float64, singular_values


@dataclass(frozen=True)
class Terms:
    """The two terms of one device.

    Raises
    ------
    ValueError
        One is not a finite number of at least 0.
    """

    taylor: float
    """Sum of ``(B gB)^2`` over the entries of B of all modules (equations 9 and 13)."""
    spectral: float
    """Mean over modules of the sum of singular values of the update ``s B A``; the paper takes those of a module."""

    def __post_init__(self) -> None:
        for name, value in (("taylor", self.taylor), ("spectral", self.spectral)):
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(
                    f"the {name} term of an importance has to be a finite number of at least 0, got"
                    f" {value}"
                )


def taylor_term(b: Tensor, gradient: Tensor) -> float:
    """Sum of ``(B gB)^2`` of one module in one step, float64.

    Parameters
    ----------
    b : (out_features, rank), any float dtype
    gradient : of the loss by it, before anything clips it

    Raises
    ------
    NotFiniteError
        One of them holds NaN or infinity.
    ValueError
        Their shapes differ.
    """
    if b.shape != gradient.shape:
        raise ValueError(
            f"a gradient is shaped like its factor, {tuple(b.shape)}, got {tuple(gradient.shape)}"
        )
    return float((as_float64(b) * as_float64(gradient)).square().sum())


def spectral_term(modules: Sequence[Factors]) -> float:
    """Mean over modules of the sum of singular values of their updates, without a dense matrix.

    Raises
    ------
    ValueError
        There is no module.
    NotFiniteError
        A factor holds NaN or infinity.
    """
    if not modules:
        raise ValueError("a device without LoRA modules has no spectral term")
    return fmean(float(singular_values(module).double().sum()) for module in modules)


def comparable(terms: Mapping[int, Terms]) -> dict[int, float]:
    """I(B_total) of each device of a round: the sum of both terms, each over its mean over the devices, so that 2 is the mean.

    A term that is 0 at all devices, as both are before B is first trained, tells none from another, and counts as 1 at each.
    """
    totals = dict.fromkeys(terms, 0.0)
    for values in (
        {key: own.taylor for key, own in terms.items()},
        {key: own.spectral for key, own in terms.items()},
    ):
        mean = sum(sorted(value / len(values) for value in values.values()))
        for device, value in values.items():
            totals[device] += value / mean if mean > 0 else 1.0
    return totals
