"""Privacy accounting: epsilon of Gaussian mechanisms with Poisson sampling, composed.

Epsilon is computed by Opacus: the smaller of two valid upper bounds, that of the privacy random
variable (Gopi et al. 2021, "Numerical Composition of Differential Privacy") and that of Rényi
moments (Mironov et al. 2019, "Rényi Differential Privacy of the Sampled Gaussian Mechanism").
Neighbouring data differ by one added or removed record or group.

Covers: mechanisms that are chosen one after the other, each in view of the earlier outputs, if
their noise and sampling rates were fixed beforehand, as those of a run are.

Does not cover: a choice of noise in view of earlier outputs. Rounding errors of float64 in the
accountant and in the sampler of noise (``noise.py``).
"""

import warnings
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from espalier.environment.imports import importing
from espalier.errors import InputError

NEARLY = 1e-3
"""Relative accuracy of a noise multiplier; it is rounded up."""
MOMENTS_ONLY = 64.0
"""Epsilon by Rényi moments above which the other bound, whose cost grows with it, is left out."""
FEWEST_NOISE = 1 / 64
MOST_NOISE = 2.0**12
"""Range in which a noise multiplier is searched."""


@dataclass(frozen=True, order=True)
class Draw:
    """Gaussian mechanism with Poisson sampling, some times in a row: one draw on a budget."""

    noise_multiplier: float
    """Standard deviation of the noise divided by the L2 sensitivity."""
    sampling_rate: float
    """Probability with which each record or group takes part in a step."""
    steps: int
    """Number of steps."""


def epsilon_of(draws: Iterable[Draw], delta: float) -> float:
    """Return epsilon at ``delta`` of all draws together; 0 without draws."""
    steps: Counter[tuple[float, float]] = Counter()
    for draw in draws:
        steps[draw.noise_multiplier, draw.sampling_rate] += draw.steps
    return _epsilon(tuple((*key, number) for key, number in sorted(steps.items())), delta)


@cache
def _epsilon(history: tuple[tuple[float, float, int], ...], delta: float) -> float:
    if not history:
        return 0.0
    with importing(), warnings.catch_warnings():
        # Opacus warns if the best of its Rényi orders is the first or the last one; the bound holds.
        warnings.simplefilter("ignore")
        from opacus.accountants import PRVAccountant, RDPAccountant

        by_moments = RDPAccountant()
        by_moments.history = list(history)
        found = float(by_moments.get_epsilon(delta))
        if found > MOMENTS_ONLY:
            return found
        by_variable = PRVAccountant()
        by_variable.history = list(history)
        return min(found, float(by_variable.get_epsilon(delta)))


@cache
def noise_multiplier(epsilon: float, delta: float, sampling_rate: float, steps: int) -> float:
    """Return the smallest noise multiplier, nearly, with which all steps keep within epsilon.

    Raises
    ------
    InputError
        No noise multiplier in the range of the search does.
    """

    def keeps(candidate: float) -> bool:
        return epsilon_of([Draw(candidate, sampling_rate, steps)], delta) <= epsilon

    low = FEWEST_NOISE
    high = 1.0
    while not keeps(high):
        low = high
        high *= 2
        if high > MOST_NOISE:
            raise InputError(
                f"privacy.epsilon = {epsilon:g}: no noise keeps {steps} steps at delta = {delta:g}"
                f" and sampling rate {sampling_rate:g} within it; raise epsilon or delta"
            )
    if keeps(low):
        return low
    while high / low > 1 + NEARLY:
        middle = (low * high) ** 0.5
        if keeps(middle):
            high = middle
        else:
            low = middle
    return high
