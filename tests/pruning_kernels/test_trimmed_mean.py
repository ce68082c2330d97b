"""Trimmed mean and median: by hand, against a loop, and as properties."""

import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pruning_kernels import trimmed_mean as module
from pruning_kernels.groups.fluctuation import Moments, pooled, trimmed
from pruning_kernels.selection.scores import NotFiniteError
from pruning_kernels.trimmed_mean import trimmed_mean


def of(values: list[list[float]], weights: list[float], trim: int) -> list[float]:
    return trimmed_mean([torch.tensor(one) for one in values], weights, trim).tolist()


def test_values_by_hand() -> None:
    """1, 2, 3, 100: the mean of 2 and 3, with weights 1 and 3 that is 2.75."""
    values = [[100.0, 1.0], [2.0, 1.0], [1.0, -50.0], [3.0, 1.0]]
    assert of(values, [1, 1, 1, 1], 1) == [2.5, 1.0]
    assert of(values, [1, 1, 1, 3], 1) == [2.75, 1.0]
    assert of(values, [1, 1, 1, 1], 0) == [26.5, -11.75]


def test_weights_of_equal_values_are_those_of_later_clients() -> None:
    """Of three equal values the first client's counts as the smallest; the second's stays."""
    assert of([[2.0], [2.0], [2.0]], [1.0, 5.0, 7.0], 1) == [2.0]


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_equals_a_loop(data: st.DataObject) -> None:
    clients = data.draw(st.integers(1, 9))
    trim = data.draw(st.integers(0, (clients - 1) // 2))
    numbers = st.sampled_from([-3.0, -1.0, 0.0, 0.5, 7.0, 1e6])
    values = data.draw(
        st.lists(st.lists(numbers, min_size=3, max_size=3), min_size=clients, max_size=clients)
    )
    weights = data.draw(st.lists(st.integers(1, 5), min_size=clients, max_size=clients))
    with pytest.MonkeyPatch.context() as monkeypatch:
        # Two columns at a time.
        monkeypatch.setattr(module, "NUMBERS_AT_ONCE", 2 * clients)
        found = of(values, weights, trim)
    for column in range(3):
        order = sorted(range(clients), key=lambda client: (values[client][column], client))
        stays = order[trim : clients - trim]
        total = sum(weights[client] for client in stays)
        expected = sum(values[client][column] * weights[client] for client in stays) / total
        assert found[column] == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_largest_trim_is_the_median() -> None:
    for clients in range(1, 10):
        values = [[float((7 * client) % 11)] for client in range(clients)]
        (found,) = of(values, [1.0] * clients, (clients - 1) // 2)
        assert found == statistics.median(value for (value,) in values)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.floats(-100, 100, width=32), min_size=5, max_size=5),
    st.lists(st.floats(-(2.0**99), 2.0**99, width=32), min_size=2, max_size=2),
)
def test_as_many_bad_clients_as_are_left_out_stay_within_the_others(
    honest: list[float], bad: list[float]
) -> None:
    (found,) = of([[value] for value in [*bad, *honest]], [1.0] * 7, 2)
    assert min(honest) - 1e-9 <= found <= max(honest) + 1e-9


def test_one_value_that_stays_is_unchanged() -> None:
    values = [[0.1], [1e-30], [3.7e30]]
    assert of(values, [0.3, 0.1, 7.0], 1) == torch.tensor([0.1]).double().tolist()


def test_shape_stays() -> None:
    values = [torch.full((2, 3), float(client)) for client in range(3)]
    assert trimmed_mean(values, [1.0] * 3, 1).shape == (2, 3)
    assert trimmed_mean([torch.empty(0, 3)] * 3, [1.0] * 3, 1).shape == (0, 3)


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="2 of 4 values cannot be left out"):
        of([[1.0]] * 4, [1.0] * 4, 2)
    with pytest.raises(ValueError, match="has to be above 0"):
        of([[1.0]] * 3, [1.0, 0.0, 1.0], 1)
    with pytest.raises(NotFiniteError):
        of([[1.0], [float("nan")], [1.0]], [1.0] * 3, 1)


def test_moments_by_hand() -> None:
    """Means 0, 1 and 100 have the median 1; distances from it are 4 + 1, 9 and huge: 9 stays."""
    parts = [
        Moments(2, torch.tensor([0.0]).double(), torch.tensor([8.0]).double()),
        Moments(3, torch.tensor([1.0]).double(), torch.tensor([27.0]).double()),
        Moments(5, torch.tensor([100.0]).double(), torch.tensor([1e9]).double()),
    ]
    found = trimmed(parts, 1)
    assert (found.count, found.mean.tolist(), found.squares.tolist()) == (10, [1.0], [90.0])


def test_moments_without_trimming_are_pooled() -> None:
    generator = torch.Generator().manual_seed(0)
    parts = [
        Moments(
            count,
            torch.randn(4, generator=generator).double(),
            torch.rand(4, generator=generator).double(),
        )
        for count in (2, 5, 3)
    ]
    for one, other in zip(
        (trimmed(parts, 0).mean, trimmed(parts, 0).squares),
        (pooled(parts).mean, pooled(parts).squares),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=0)
