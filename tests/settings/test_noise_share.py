"""Shares of noise: whatever drops out and whoever is dishonest, a sum has all noise."""

import math
from itertools import product
from typing import Any

import pytest

from espalier.errors import EspalierError
from espalier.secure_sum.neighbours import ALL_UP_TO, two_thirds
from espalier.settings.run import parse
from espalier.settings.tables.noise_share import MAX_CLIENTS, NoiseShare

FRACTIONS = [0.01, 0.3, 0.5, 0.6, 2 / 3, 0.7, 0.75, 0.8, 0.9, 0.99, 1.0]


def test_shares_by_hand() -> None:
    """Of 8 sites 6 are in a sum, of them 2 dishonest: each of 4 adds a quarter of the variance."""
    share = NoiseShare(8, 0.75)
    assert (share.dishonest, share.least_of_sum, share.honest_in_sum, share.fault) == (2, 6, 4, "")
    # Products that lie just below a whole number.
    assert NoiseShare(10, 0.7).dishonest == 3
    # A site knows its own noise, so one always counts.
    assert NoiseShare(3, 1.0).dishonest == 1
    assert "a secure sum bears 3 of them" in NoiseShare(8, 0.5).fault
    assert MAX_CLIENTS == ALL_UP_TO
    assert not NoiseShare(100, 0.8).fault
    assert "at most 100 sites can share noise" in NoiseShare(101, 0.8).fault


@pytest.mark.parametrize("clients", range(3, 41))
def test_every_possible_sum_has_all_noise(clients: int) -> None:
    """Try all sizes of a sum and numbers of dishonest sites in it."""
    for fraction in FRACTIONS:
        share = NoiseShare(clients, fraction)
        assert share.least_of_sum == two_thirds(clients)
        if share.fault:
            continue
        assert clients - share.dishonest <= math.floor(clients * fraction + 1e-9)
        each = 1 / share.honest_in_sum
        for size, bad in product(
            range(share.least_of_sum, clients + 1), range(share.dishonest + 1)
        ):
            honest = min(size - bad, clients - share.dishonest)
            assert honest * each >= 1


@pytest.mark.parametrize("clients", range(3, 41))
def test_two_sums_of_a_round_are_not_possible(clients: int) -> None:
    """Honest sites confirm one sum each; all ways to divide them between two sums are tried."""
    for fraction in FRACTIONS:
        share = NoiseShare(clients, fraction)
        honest = clients - share.dishonest
        both = [
            min(one, honest - one) + share.dishonest >= share.least_of_sum
            for one in range(honest + 1)
        ]
        assert any(both) <= bool(share.fault)


def of(**changes: Any) -> dict[str, Any]:
    given = {key.replace("__", ".").replace("_", "-"): value for key, value in changes.items()}
    return {
        "method": "pooled-pruning",
        "num-clients": 8,
        "privacy.epsilon": 4.0,
        "privacy.honest-fraction": 0.75,
        "federation.secure-sum": True,
        "evaluation.local-baseline": False,
    } | given


def test_a_run_may_share_noise() -> None:
    assert parse(of()).privacy.honest_fraction == 0.75


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"privacy__honest_fraction": 0.5}, "4 of num-clients = 8 may then be dishonest"),
        ({"federation__secure_sum": False}, "without federation.secure-sum the server sees each"),
        ({"num_clients": 2}, "needs num-clients between 3 and 900"),
        ({"privacy__honest_fraction": 1.5}, "less than or equal to 1"),
    ],
)
def test_other_runs_may_not(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(EspalierError) as error:
        parse(of(**changes))
    assert reason in str(error.value)
