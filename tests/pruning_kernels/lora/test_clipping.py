"""Limits on the update of one client: by hand, and as properties."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pruning_kernels.groups.fluctuation import Moments, limited_by_median
from pruning_kernels.lora.clipping import (
    clip_factors,
    clip_rows,
    distances_from_others,
    limited_moments,
    root_mean_square,
    within_band,
    within_norm,
    within_ratio,
)


@pytest.mark.parametrize(
    ("sizes", "ratio", "factors"),
    [
        ([1.0, 2.0, 8.0], 2.0, [1.0, 1.0, 0.5]),
        ([1.0, 2.0, 4.0], 2.0, [1.0, 1.0, 1.0]),
        ([3.0, 1.0, 100.0, 2.0], 2.0, [1.0, 1.0, 0.04, 1.0]),
        ([0.0, 0.0, 5.0], 2.0, [1.0, 1.0, 0.0]),
        ([1.0, 1e9], 2.0, [1.0, 1.0]),
        ([1e9], 2.0, [1.0]),
    ],
)
def test_factors_by_hand(sizes: list[float], ratio: float, factors: list[float]) -> None:
    assert list(clip_factors(dict(enumerate(sizes)), ratio).values()) == factors
    rows = clip_rows([torch.tensor([size, 1.0]) for size in sizes], ratio)
    assert [row.tolist() for row in rows] == [[factor, 1.0] for factor in factors]


def test_row_unchanged_at_median_may_change() -> None:
    """The limit is 10% of the change of the median row, times the ratio: 0.1 * 3 * 4."""
    own = [
        torch.tensor([0.0, 2.0, 3.0]),
        torch.tensor([0.0, 3.0, 4.0]),
        torch.tensor([2.4, 3.0, 5.0]),
    ]
    first, second, third = clip_rows(own, 4.0)
    assert first.tolist() == second.tolist() == [1.0, 1.0, 1.0]
    assert third.tolist() == pytest.approx([0.5, 1.0, 1.0])


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.floats(0.1, 100.0), min_size=2, max_size=9),
    st.floats(1.0, 5.0),
    st.floats(0.0, 1e30),
)
def test_client_is_limited_by_largest_other(
    honest: list[float], ratio: float, absurd: float
) -> None:
    sizes = dict(enumerate([*honest, absurd]))
    factors = clip_factors(sizes, ratio)
    assert max(size * factors[client] for client, size in sizes.items()) <= ratio * max(honest) * (
        1 + 1e-12
    )


def test_root_mean_square_ignores_count() -> None:
    assert (
        root_mean_square(torch.full((3, 4), -2.0)) == root_mean_square(torch.full((7,), 2.0)) == 2.0
    )
    assert root_mean_square(torch.empty(0)) == 0.0


def test_the_change_of_all_tensors_has_at_most_the_norm() -> None:
    """The changes are (3, 0) and (4): their norm is 5."""
    before = {"a": {"x": torch.tensor([1.0, 2.0])}, "b": {"y": torch.tensor([-1.0])}}
    after = {"a": {"x": torch.tensor([4.0, 2.0])}, "b": {"y": torch.tensor([3.0])}}
    found = within_norm(after, before, 2.5)
    assert found["a"]["x"].tolist() == [2.5, 2.0]
    assert found["b"]["y"].tolist() == [1.0]
    assert found["a"]["x"].dtype == torch.float32
    for limit in (5.0, 7.0):
        assert within_norm(after, before, limit) == after
    assert within_norm(before, before, 1e-9) == before


def test_distances_from_the_mean_of_the_others() -> None:
    changes = torch.tensor([[1.0, 2.0], [3.0, -1.0], [0.0, 5.0], [-7.0, 0.5]]).double()
    found = distances_from_others(changes @ changes.T)
    for place, own in enumerate(changes):
        others = torch.cat([changes[:place], changes[place + 1 :]]).mean(dim=0)
        assert found[place] == pytest.approx(float((own - others).norm()))


def test_numbers_stay_near_median_client() -> None:
    numbers = torch.tensor([[1.0, 4.0, 0.0], [2.0, 4.0, 0.0], [100.0, 0.1, 9.0]])
    assert within_ratio(numbers, 2.0).tolist() == [
        [1.0, 4.0, 0.0],
        [2.0, 4.0, 0.0],
        [4.0, 2.0, 0.0],
    ]
    assert within_ratio(numbers[1:], 2.0) is not None
    assert torch.equal(within_ratio(numbers[1:], 2.0), numbers[1:])
    shares = torch.tensor([[1.0, -3.0], [1.0, -3.0], [-1.0, 9.0]])
    assert within_band(shares, 2.0).tolist() == [[1.0, -3.0], [1.0, -3.0], [0.0, 0.0]]


def test_moments_are_limited_in_weak_directions() -> None:
    """Energies of the others are 16, 4 and 0.01 on rotated axes; the client's own is in the third.

    The floor is 10% of the energy of the median dimension.
    """
    turn, _ = torch.linalg.qr(
        torch.tensor([[1.0, 2.0, 0.0], [0.0, 1.0, 1.0], [1.0, 0.0, 3.0]]).double()
    )
    others = turn @ torch.diag(torch.tensor([16.0, 4.0, 0.01]).double()) @ turn.T
    own = turn @ torch.diag(torch.tensor([0.0, 0.0, 20.0]).double()) @ turn.T
    limited, largest = limited_moments(own, others, 2.0)
    most = 2 * 0.01 + 0.1 * float(others.diagonal().median())
    assert largest == pytest.approx(20 / most)
    assert torch.allclose(
        turn.T @ limited @ turn, torch.diag(torch.tensor([0.0, 0.0, most]).double()), atol=1e-9
    )
    same, nothing = limited_moments(1.9 * others, others, 2.0)
    assert nothing == 1.0
    assert torch.equal(same, 1.9 * others)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_limited_moments_stay_below_bound(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    roots = [
        torch.randn(6, 5, generator=generator).double()
        * 10 ** float(torch.rand(1, generator=generator))
        for _ in "12"
    ]
    own, others = (root @ root.T for root in roots)
    limited, _ = limited_moments(own, others, 2.0)
    bound = 2 * others + 0.1 * others.diagonal().median() * torch.eye(6)
    assert torch.linalg.eigvalsh(bound - limited)[0] > -1e-9 * bound.trace()
    assert torch.linalg.eigvalsh(limited)[0] > -1e-9 * bound.trace()


def test_channel_moments_stay_near_median() -> None:
    """Variances are 1, 1, 1 and 1e6; means are 0, 0.1, -0.1 and 30 standard deviations."""
    parts = [
        Moments(10, torch.full((4,), mean).double(), torch.full((4,), 10 * variance).double())
        for mean, variance in ((0.0, 1.0), (0.1, 1.0), (-0.1, 1.0), (30.0, 1e6))
    ]
    limited, excesses = limited_by_median(parts, 2.0)
    assert excesses[:3] == [1.0, 1.0, 1.0]
    assert all(
        one is not None and torch.equal(one.mean, part.mean)
        for one, part in zip(limited[:3], parts, strict=False)
    )
    assert torch.allclose(limited[3].squares, torch.full((4,), 20.0).double())
    assert torch.allclose(limited[3].mean, torch.full((4,), 0.2).double())
    assert excesses[3] == pytest.approx(5e5)
