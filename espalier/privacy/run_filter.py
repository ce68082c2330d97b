"""Privacy filter: composition of runs whose noise is chosen in view of earlier replies.

A server that knows the replies of one run may choose epsilon, rate and steps of the next one by
them. Rényi divergences of one order add up all the same, if the order was fixed before the first
reply (Feldman and Zrnic 2021, "Individual Privacy Accounting via a Rényi Filter"), also if runs
overlap (Haney et al. 2023, "Concurrent Composition for Interactive Differential Privacy with
Adaptive Privacy-Loss Parameters"). The smaller of several bounds, which ``accounting`` takes, would
be a choice in view of replies.

The order is the one at which the first run's plan would fit into the budget most often. The plan
follows from settings, so it is known before the first reply.

Covers: all runs of a site that has a budget.
Does not cover: a budget that its owner changes in view of replies, because the order depends on it.
"""

import warnings
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from espalier.environment.imports import importing
from espalier.privacy.accounting import Draw, counted

MORE_ORDERS = (96.0, 128.0, 256.0, 512.0, 1024.0)
"""Orders beyond those of Opacus, for small epsilons."""
LEAST = 1e-15
"""Divergence of all draws that is assumed at least; Opacus's rounding may give 0 or less."""


def filtered_epsilon(
    first: Iterable[Draw], draws: Iterable[Draw], max_epsilon: float, delta: float
) -> float:
    """Return epsilon at ``delta`` of the draws of several runs, by a fixed Rényi order.

    Parameters
    ----------
    first : all draws that the first run planned
    draws : draws of all runs together
    max_epsilon : budget of the site, positive
    """
    orders = _orders()
    # Epsilon of no divergence: what the order itself costs.
    costs = np.array([_epsilon(0.0, order, delta) for order in orders])
    # Number of times that the plan fits.
    times = (max_epsilon - costs) / _divergences(first, orders)
    order = orders[times.argmax()]
    return _epsilon(_divergences(draws, np.array([order]))[0], order, delta)


def _orders() -> NDArray[np.float64]:
    with importing(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from opacus.accountants import RDPAccountant
    return np.array([*RDPAccountant.DEFAULT_ALPHAS, *MORE_ORDERS])


def _divergences(draws: Iterable[Draw], orders: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the Rényi divergence of all draws together at each order."""
    from opacus.accountants.analysis.rdp import compute_rdp

    total = np.zeros_like(orders)
    for noise_multiplier, sampling_rate, steps in counted(draws):
        total += compute_rdp(
            q=sampling_rate, noise_multiplier=noise_multiplier, steps=steps, orders=orders
        )
    return np.maximum(total, LEAST)


def _epsilon(divergence: float, order: float, delta: float) -> float:
    from opacus.accountants.analysis.rdp import get_privacy_spent

    with warnings.catch_warnings():
        # Opacus warns if the best order is the first or the last one; here there is only one.
        warnings.simplefilter("ignore")
        epsilon, _ = get_privacy_spent(orders=order, rdp=divergence, delta=delta)
    return float(epsilon)
