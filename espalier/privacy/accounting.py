"""Privacy accounting: epsilon of Gaussian mechanisms with Poisson sampling, composed.

Epsilon is computed by Opacus: the smaller of two valid upper bounds, that of the privacy random
variable (Gopi et al. 2021, "Numerical Composition of Differential Privacy") and that of Rényi
moments (Mironov et al. 2019, "Rényi Differential Privacy of the Sampled Gaussian Mechanism").
Neighbouring data differ by one added or removed record or group.

Covers: mechanisms that are chosen one after the other, each in view of the earlier outputs, if
their noise and sampling rates were fixed beforehand, as those of a run are.

Does not cover: a choice of noise in view of earlier outputs; see ``run_filter.py``. Rounding errors
of float64 in the accountant and in the sampler of noise (``noise.py``).
"""

import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache

from espalier.environment.imports import importing
from espalier.errors import InputError

NEARLY = 5e-3
"""Relative accuracy of a noise multiplier; it is rounded up."""
MOMENTS = "RDPAccountant"
"""Opacus's bound by Rényi moments."""
VARIABLE = "PRVAccountant"
"""Opacus's bound by the privacy random variable, which is lower and takes longer."""
MOMENTS_ONLY = 64.0
"""Epsilon by Rényi moments above which the other bound, whose cost grows with it, is left out."""
LESS_BY_BOTH = 0.8
"""Factor on the noise by Rényi moments in each step of the search with both bounds."""
FEWEST_NOISE = 1 / 64
MAX_NOISE = 2.0**12
"""Range in which a noise multiplier is searched."""


History = tuple[tuple[float, float, int], ...]
"""Noise multiplier, sampling rate and number of steps of each mechanism, as Opacus has them."""


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
    """Return epsilon at ``delta``, of at least 1e-10, of all draws together; 0 without draws."""
    if not (history := counted(draws)):
        return 0.0
    epsilon = _bound(MOMENTS, history, delta)
    # Both bounds are valid, so the smaller one may be used.
    return epsilon if epsilon > MOMENTS_ONLY else min(epsilon, _bound(VARIABLE, history, delta))


def counted(draws: Iterable[Draw]) -> History:
    """Return the mechanisms of some draws, each with its number of steps, in a fixed order."""
    # Equal mechanisms are counted together, which Opacus handles much faster.
    steps: Counter[tuple[float, float]] = Counter()
    for draw in draws:
        steps[draw.noise_multiplier, draw.sampling_rate] += draw.steps
    return tuple((*key, num_steps) for key, num_steps in sorted(steps.items()))


@cache
def _bound(accountant: str, history: History, delta: float) -> float:
    """Return the bound on epsilon by one of Opacus's accountants."""
    with importing(), warnings.catch_warnings():
        # Opacus warns if the best of its Rényi orders is the first or the last one; the bound
        # holds. By the privacy random variable it takes the logarithm of 0 where it does not use
        # it, at sampling rate 1.
        warnings.simplefilter("ignore")
        from opacus import accountants

        counted = getattr(accountants, accountant)()
        # The history is set directly: Opacus would merge only consecutive equal steps.
        counted.history = list(history)
        # With much noise and a large delta the formulas give less than 0.
        return max(0.0, float(counted.get_epsilon(delta)))


@cache
def noise_multiplier(epsilon: float, delta: float, sampling_rate: float, steps: int) -> float:
    """Return the smallest noise multiplier, nearly, with which all steps keep within epsilon.

    Raises InputError if no noise multiplier in the range of the search does.
    """

    def by_moments(candidate: float) -> bool:
        return _bound(MOMENTS, ((candidate, sampling_rate, steps),), delta) <= epsilon

    def by_both(candidate: float) -> bool:
        return epsilon_of([Draw(candidate, sampling_rate, steps)], delta) <= epsilon

    # The bound by moments is cheap, and the other one allows a little less noise. Opacus' Rényi
    # orders do not reach the smallest epsilons.
    # Even the most noise may not suffice for a tiny epsilon.
    cheap = by_moments(MAX_NOISE)
    if not cheap and not by_both(MAX_NOISE):
        raise InputError(
            f"privacy.epsilon = {epsilon:g}: no noise keeps {steps} steps at delta = {delta:g} and"
            f" sampling rate {sampling_rate:g} within it; raise epsilon or delta"
        )
    # The cheap bound gives the upper end of the search with both.
    high = _smallest(by_moments if cheap else by_both)
    low = high * LESS_BY_BOTH
    # Usually once at most; for small epsilons the bounds differ more.
    while low > FEWEST_NOISE and by_both(low):
        high, low = low, low * LESS_BY_BOTH
    return _between(by_both, low, high)


def _smallest(keeps: Callable[[float], bool]) -> float:
    """Return the smallest noise multiplier, nearly, that keeps; the largest of the range does."""
    high = 1.0
    # The bounds take long for little noise, so the search begins with much.
    while not keeps(high):
        high *= 2
    low = high / 2
    while low > FEWEST_NOISE and keeps(low):
        high = low
        low /= 2
    return _between(keeps, low, high)


def _between(keeps: Callable[[float], bool], low: float, high: float) -> float:
    """Return the smallest number between two, nearly, that keeps; ``high`` does."""
    # Geometric bisection: the relative accuracy counts.
    while high / low > 1 + NEARLY:
        middle = (low * high) ** 0.5
        if keeps(middle):
            high = middle
        else:
            low = middle
    return high
