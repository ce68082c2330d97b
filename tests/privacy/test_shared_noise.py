"""Shared noise: variances by hand, and what is left when sites drop out or tell their noise."""

import pytest

from espalier.errors import EspalierError
from espalier.privacy.accounting import Draw, epsilon_of
from espalier.privacy.noise import SeededBits
from espalier.privacy.shared_noise import (
    deviation_of_site,
    honest_sites,
    noise_multiplier_of_sum,
)
from pruning_kernels.fixed_point import RECORD_BITS


def test_variances_add_up_to_that_of_one() -> None:
    assert deviation_of_site(6.0, 9, 1.0) == 2.0
    assert deviation_of_site(6.0, 8, 0.5) == 3.0
    assert deviation_of_site(6.0, 1, 1.0) == 6.0


def test_honest_sites_are_rounded_down() -> None:
    assert [honest_sites(number, 0.7) for number in (2, 3, 10)] == [1, 2, 7]


@pytest.mark.parametrize(("sites", "fraction"), [(4, 0.0), (4, 1.1), (3, 0.3)])
def test_too_few_honest_sites_are_refused(sites: int, fraction: float) -> None:
    with pytest.raises(EspalierError, match="honest fraction"):
        deviation_of_site(1.0, sites, fraction)


def test_the_sum_of_rounded_parts_has_the_noise_of_the_accounting() -> None:
    pytest.importorskip("scipy", reason="needs the extra privacy")
    sites, number = 5, 40_000
    own = deviation_of_site(3.0, sites, 0.8)
    parts = [SeededBits(0, site, 1).grid_noise(number, own) for site in range(sites)]
    honest = sum(parts[1:]) / 2.0**RECORD_BITS
    expected = noise_multiplier_of_sum(own, sites, dropped=1, dishonest=0)
    assert expected == pytest.approx(3.0)
    assert honest.std() == pytest.approx(expected, rel=6 / (2 * number) ** 0.5)


def test_colluding_sites_cost_what_the_accounting_says() -> None:
    pytest.importorskip("opacus", reason="needs the extra privacy")
    own = deviation_of_site(4.0, 10, 1.0)
    found = [
        epsilon_of([Draw(noise_multiplier_of_sum(own, 10, 0, told), 1.0, 1)], 1e-5)
        for told in (0, 5)
    ]
    assert found[0] == pytest.approx(epsilon_of([Draw(4.0, 1.0, 1)], 1e-5), rel=1e-9)
    assert found[1] == pytest.approx(epsilon_of([Draw(4 / 2**0.5, 1.0, 1)], 1e-5), rel=1e-9)
    assert noise_multiplier_of_sum(own, 10, dropped=4, dishonest=6) == 0
