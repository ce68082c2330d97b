"""Privacy filter: composition of runs whose noise is chosen in view of earlier replies.

A server that knows the replies of one run may choose epsilon, rate and steps of the next one by
them. Rényi moments of one order add up all the same, if the order was fixed before the first reply
(Feldman and Zrnic 2021, "Individual Privacy Accounting via a Rényi Filter", theorem 3.1), also if
runs overlap (Haney et al. 2023, "Concurrent Composition for Interactive Differential Privacy with
Adaptive Privacy-Loss Parameters"). The smaller of several bounds, which ``accounting`` takes, would
be a choice in view of replies.

The order is the one at which the first run's plan would fit into the budget most often. The plan
follows from settings, so it is known before the first reply.

Covers: all runs of a site that has a budget.
Does not cover: a budget that its owner changes in view of replies, because the order depends on it.
"""

import math
import warnings
from collections.abc import Iterable, Sequence

from espalier.environment.imports import importing
from espalier.privacy.accounting import Draw, counted

MORE_ORDERS = (96.0, 128.0, 256.0, 512.0, 1024.0)
"""Orders beyond those of Opacus, for small epsilons."""


def filtered_epsilon(
    first: Iterable[Draw], draws: Iterable[Draw], max_epsilon: float, delta: float
) -> float:
    """Return epsilon at ``delta`` of the draws of several runs, by moments of a fixed order.

    Parameters
    ----------
    first : all draws that the first run planned
    draws : draws of all runs together
    max_epsilon : budget of the site, positive
    """
    orders = _orders()
    planned = _moments(first, orders)
    # Epsilon of draws without moments: what the order itself costs.
    added = [_epsilon(0.0, order, delta) for order in orders]
    # How often the plan fits; a moment that overflowed is infinite, and its order is not used.
    times = [
        (max_epsilon - cost) / moment if math.isfinite(moment) else -math.inf
        for cost, moment in zip(added, planned, strict=True)
    ]
    order = orders[times.index(max(times))]
    return _epsilon(_moments(draws, [order])[0], order, delta)


def _orders() -> list[float]:
    with importing(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from opacus.accountants import RDPAccountant
    return [*map(float, RDPAccountant.DEFAULT_ALPHAS), *MORE_ORDERS]


def _moments(draws: Iterable[Draw], orders: Sequence[float]) -> list[float]:
    """Return the Rényi divergence of all draws together at each order; at least 1e-300."""
    from opacus.accountants.analysis.rdp import compute_rdp

    totals = [1e-300] * len(orders)
    for noise_multiplier, sampling_rate, steps in counted(draws):
        for place, order in enumerate(orders):
            # An order at a time: with one that overflows Opacus gives no number.
            found = float(
                compute_rdp(
                    q=sampling_rate, noise_multiplier=noise_multiplier, steps=steps, orders=order
                )
            )
            totals[place] += math.inf if math.isnan(found) else found
    return totals


def _epsilon(moment: float, order: float, delta: float) -> float:
    """Return epsilon by a Rényi divergence (Balle et al. 2020, theorem 21)."""
    return moment + math.log1p(-1 / order) - (math.log(delta) + math.log(order)) / (order - 1)
