"""Composition of runs that may be chosen in view of replies, by divergences of one fixed order."""

import math

import pytest

from espalier.privacy.accounting import Draw, epsilon_of, noise_multiplier
from espalier.privacy.run_filter import MORE_ORDERS, filtered_epsilon

pytest.importorskip("opacus", reason="needs the extra privacy")

DELTA = 1e-5
ORDERS = [*(1 + tenth / 10 for tenth in range(1, 100)), *range(12, 64), *MORE_ORDERS]
SAMPLED = Draw(1.2, 0.02, 60)
WHOLE = Draw(4.0, 1.0, 1)


def by_hand(multipliers: list[float], budget: float) -> float:
    """Return epsilon of Gaussian mechanisms, whose divergence at order a is a / (2 sigma^2)."""
    of_first = 1 / (2 * multipliers[0] ** 2)
    best_times, best_order = -math.inf, 0.0
    for order in ORDERS:
        cost = math.log(1 - 1 / order) + math.log(1 / (DELTA * order)) / (order - 1)
        if (times := (budget - cost) / (order * of_first)) > best_times:
            best_times, best_order = times, order
    cost = math.log(1 - 1 / best_order) + math.log(1 / (DELTA * best_order)) / (best_order - 1)
    return cost + best_order * sum(1 / (2 * sigma**2) for sigma in multipliers)


@pytest.mark.parametrize("budget", [0.05, 0.5, 4.0, 50.0])
@pytest.mark.parametrize("multipliers", [[5.0, 3.0, 20.0], [1.0, 100.0], [60.0, 60.0]])
def test_gaussian_mechanisms_equal_the_formula(budget: float, multipliers: list[float]) -> None:
    draws = [Draw(sigma, 1.0, 1) for sigma in multipliers]
    found = filtered_epsilon(draws[:1], draws, budget, DELTA)
    assert found == pytest.approx(by_hand(multipliers, budget), rel=1e-9)


@pytest.mark.parametrize("first", [SAMPLED, WHOLE])
def test_what_a_draw_adds_does_not_depend_on_the_others(first: Draw) -> None:
    """The order is fixed by the first plan, so divergences only add up."""

    def total(*later: Draw) -> float:
        return filtered_epsilon([first], [first, *later], 4.0, DELTA)

    alone = total()
    one, other = Draw(1.5, 0.1, 30), Draw(7.0, 1.0, 2)
    both = alone + (total(one) - alone) + (total(other) - alone)
    assert total(one, other) == pytest.approx(both, rel=1e-9)


@pytest.mark.parametrize(("rate", "steps"), [(1.0, 1), (0.02, 60)])
@pytest.mark.parametrize("budget", [1.0, 8.0])
def test_two_runs_of_half_the_budget_fit(rate: float, steps: int, budget: float) -> None:
    half = Draw(noise_multiplier(budget / 2, DELTA, rate, steps), rate, steps)
    total = filtered_epsilon([half], [half, half], budget, DELTA)
    # Choosing runs by replies costs something, and less than adding up epsilons.
    assert epsilon_of([half, half], DELTA) < total < budget


def test_rounding_gives_no_divergence_below_zero() -> None:
    """Opacus's sums for this draw are negative at some orders, which would pay something back."""
    rare = Draw(4096.0, 1e-6, 1)
    total = filtered_epsilon([rare], [rare] * 3, 4.0, DELTA)
    assert total >= filtered_epsilon([rare], [], 4.0, DELTA)


def test_a_budget_that_no_order_reaches_fits_nothing() -> None:
    tiny = Draw(1e4, 1.0, 1)
    assert filtered_epsilon([tiny], [tiny], 1e-4, DELTA) > 1e-4
