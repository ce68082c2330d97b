"""Counted weights of the clients' claims: by hand, and for any claims."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from espalier.errors import EspalierError
from espalier.settings.run import parse
from strategies.averaging.client_weights import limited_weights, up_to_median
from strategies.pruning.fedspallm.strategy import layers_per_client


@pytest.mark.parametrize(
    ("claimed", "ratio", "counted"),
    [
        ([1.0, 2.0, 4.0], 4.0, [1.0, 2.0, 4.0]),
        ([1.0, 1.0, 1e9], 4.0, [1.0, 1.0, 4.0]),
        ([5.0, 1e9], 10.0, [5.0, 50.0]),
        ([1e9, 1e9, 3.0, 2.0], 2.0, [6.0, 6.0, 3.0, 2.0]),
        ([0.0, 0.0, 0.0, 7.0], 1.0, [0.0, 0.0, 0.0, 7.0]),
        ([0.0, 0.0], 2.0, [0.0, 0.0]),
        ([1e-300, 1.0, 1.0], 4.0, [1e-300, 1.0, 1.0]),
        ([8.0], 1.0, [8.0]),
        ([1.0] * 7 + [1e9], 2.0, [1.0] * 7 + [2.0]),
        (
            [0.25, 0.25, 0.25, 0.25, 1.0, 1.0, 1.0, 1e9],
            8.0,
            [0.25, 0.25, 0.25, 0.25, 1.0, 1.0, 1.0, 2.0],
        ),
        ([1.0, 1.0, 1.0, 9.0, 9.0, 9.0, 9.0], 9.0, [1.0, 1.0, 1.0, 9.0, 9.0, 9.0, 9.0]),
        (
            [0.125, 0.125, 0.125, 1.0, 1.0, 1.0, 1.0, 1e9],
            2.0,
            [0.125, 0.125, 0.125, 1.0, 1.0, 1.0, 1.0, 1.4583333333333333],
        ),
        ([4.0, 2.0, 8.0], 1.0, [2.0, 2.0, 2.0]),
    ],
)
def test_by_hand(claimed: list[float], ratio: float, counted: list[float]) -> None:
    assert limited_weights(dict(enumerate(claimed)), ratio) == dict(enumerate(counted))


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.floats(0.1, 100.0), min_size=3, max_size=9),
    st.floats(1.0, 20.0),
    st.floats(1e3, 1e12),
)
def test_minority_is_limited_by_honest_claims(
    honest: list[float], ratio: float, absurd: float
) -> None:
    attackers = (len(honest) - 1) // 2
    counted = limited_weights(dict(enumerate(honest + [absurd] * attackers)), ratio)
    assert max(counted.values()) <= ratio * max(honest)
    assert list(counted) == list(range(len(honest) + attackers))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(1e-3, 1e12), min_size=1, max_size=12), st.floats(1.0, 20.0))
def test_no_client_exceeds_its_bounded_share(claimed: list[float], ratio: float) -> None:
    """A client has at most 25% with eight clients and the default ratio 2.

    A claim below the largest counted one counts in full.
    """
    counted = list(limited_weights(dict(enumerate(claimed)), ratio).values())
    assert max(counted) / sum(counted) <= ratio / len(claimed) * (1 + 1e-9)
    largest = max(counted)
    for value, own in zip(counted, claimed, strict=True):
        assert value == (own if own < largest else largest)


def test_absurd_capability_leaves_others_layers() -> None:
    claimed = {0: 1.0, 1: 1.0, 2: 1e9}
    assert layers_per_client(12, 1.0, claimed) == {0: 1, 1: 1, 2: 12}
    assert layers_per_client(12, 1.0, up_to_median(claimed, 4.0)) == {0: 3, 1: 3, 2: 12}


def test_a_ratio_below_one_is_refused() -> None:
    with pytest.raises(EspalierError, match=r"federation\.max-weight-ratio"):
        parse({"method": "hetlora", "federation.max-weight-ratio": 0.5})
