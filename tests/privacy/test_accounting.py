"""Epsilon against closed forms, numbers of another library, and properties of composition."""

import math
from itertools import pairwise

import pytest

from espalier.errors import EspalierError
from espalier.privacy.accounting import Draw, epsilon_of, noise_multiplier

pytest.importorskip("opacus", reason="needs the extra privacy")

DELTA = 1e-5
SLACK = 0.012
"""Opacus' bound is at most 0.01 above the truth, plus what delta's error costs."""


def delta_of_gaussian(multiplier: float, epsilon: float) -> float:
    """Return delta of the Gaussian mechanism (Balle and Wang 2018, theorem 8)."""

    def phi(value: float) -> float:
        return math.erfc(-value / math.sqrt(2)) / 2

    half = 1 / (2 * multiplier)
    return phi(half - epsilon * multiplier) - math.exp(epsilon) * phi(-half - epsilon * multiplier)


def exact_epsilon(multiplier: float, delta: float = DELTA) -> float:
    low, high = 0.0, 100.0
    for _ in range(80):
        middle = (low + high) / 2
        if delta_of_gaussian(multiplier, middle) > delta:
            low = middle
        else:
            high = middle
    return high


@pytest.mark.parametrize("delta", [0.01, DELTA, 1e-10])
@pytest.mark.parametrize("multiplier", [0.5, 1.0, 4.0, 20.0])
def test_a_single_gaussian_is_that_of_the_closed_form(multiplier: float, delta: float) -> None:
    found = epsilon_of([Draw(multiplier, 1.0, 1)], delta)
    assert 0 <= found - exact_epsilon(multiplier, delta) < SLACK


def test_epsilon_is_never_negative() -> None:
    assert epsilon_of([Draw(4096.0, 1.0, 1)], 0.01) == 0.0


def test_four_gaussians_are_one_with_half_the_noise() -> None:
    found = epsilon_of([Draw(10.0, 1.0, 1)] * 4, DELTA)
    assert found == epsilon_of([Draw(10.0, 1.0, 4)], DELTA)
    assert 0 <= found - exact_epsilon(5.0) < SLACK


@pytest.mark.parametrize(
    ("draws", "expected"),
    [
        ([Draw(4.0, 1.0, 1)], 0.9263415237),
        ([Draw(1.0, 0.05, 100), Draw(4.0, 1.0, 1), Draw(10.0, 1.0, 4)], 3.7393720561),
    ],
)
def test_another_library_agrees(draws: list[Draw], expected: float) -> None:
    """The numbers are those of dp-accounting 0.6.0 (PLDAccountant, add or remove one)."""
    assert 0 <= epsilon_of(draws, DELTA) - expected < SLACK


def test_opacus_own_accountant_agrees() -> None:
    from opacus.accountants import RDPAccountant

    by_moments = RDPAccountant()
    for _ in range(30):
        by_moments.step(noise_multiplier=1.1, sample_rate=0.1)
    found = epsilon_of([Draw(1.1, 0.1, 10)] * 3, DELTA)
    assert 0.7 * by_moments.get_epsilon(DELTA) < found <= by_moments.get_epsilon(DELTA)


def test_draws_compose_and_their_order_does_not_matter() -> None:
    draws = [Draw(1.5, 0.1, 20), Draw(5.0, 1.0, 1), Draw(3.0, 0.5, 2)]
    sums = [epsilon_of(draws[:number], DELTA) for number in range(4)]
    assert sums[0] == 0
    assert all(before < after for before, after in pairwise(sums))
    assert epsilon_of(reversed(draws), DELTA) == sums[-1]


@pytest.mark.parametrize(
    ("epsilon", "rate", "steps"), [(0.1, 1.0, 1), (1.0, 1.0, 1), (8.0, 1.0, 1), (2.0, 0.1, 30)]
)
def test_noise_keeps_within_epsilon_and_hardly_less_would(
    epsilon: float, rate: float, steps: int
) -> None:
    found = noise_multiplier(epsilon, DELTA, rate, steps)
    assert epsilon_of([Draw(found, rate, steps)], DELTA) <= epsilon
    assert epsilon_of([Draw(found * 0.98, rate, steps)], DELTA) > epsilon


def test_more_steps_than_any_noise_can_keep_are_refused() -> None:
    with pytest.raises(EspalierError, match=r"privacy\.epsilon = 1e-06: no noise keeps"):
        noise_multiplier(1e-6, 1e-9, 1.0, 10**6)
