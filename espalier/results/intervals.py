"""Intervals of 95% confidence: of a fraction of items, and of a mean over clients."""

from collections.abc import Sequence
from math import sqrt
from statistics import NormalDist, fmean, stdev

CONFIDENCE = 0.95
FEWEST = 3
"""Number of clients from which a mean has an interval; that of two would be 13 times its error."""
T_QUANTILES = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
"""Quantiles of Student's t distribution at ``CONFIDENCE``, two-sided, from 1 degree of freedom."""


def wilson_interval(fraction: float, number: int) -> tuple[float, float]:
    """Return the Wilson interval of a fraction of ``number`` items, at ``CONFIDENCE``.

    Source: E. B. Wilson, Probable Inference, the Law of Succession, and Statistical Inference,
    JASA 22 (1927).
    """
    z = _normal_quantile()
    centre = fraction + z * z / (2 * number)
    half = z * sqrt(fraction * (1 - fraction) / number + z * z / (4 * number * number))
    scale = 1 + z * z / number
    return max(0.0, (centre - half) / scale), min(1.0, (centre + half) / scale)


def mean_interval(values: Sequence[float], highest: float) -> tuple[float, float] | None:
    """Return the interval of a mean by Student's t distribution; None for fewer than ``FEWEST``.

    It says where the mean over further clients like these would be. The interval is cut at 0 and at
    ``highest``.
    """
    number = len(values)
    if number < FEWEST:
        return None
    half = _t_quantile(number - 1) * stdev(values) / sqrt(number)
    mean = fmean(values)
    return max(0.0, mean - half), min(highest, mean + half)


def _t_quantile(degrees: int) -> float:
    """Return the quantile; beyond the table by the first terms of its Cornish-Fisher expansion."""
    if degrees <= len(T_QUANTILES):
        return T_QUANTILES[degrees - 1]
    z = _normal_quantile()
    return z + (z**3 + z) / (4 * degrees) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)


def _normal_quantile() -> float:
    return NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
