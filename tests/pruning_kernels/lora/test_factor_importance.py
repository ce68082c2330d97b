"""Importance of LoRA modules by hand and against loops, and the refused values."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pruning_kernels.lora.factors import Factors
from pruning_kernels.lora.importance import Terms, comparable, spectral_term, taylor_term

pytestmark = pytest.mark.usefixtures("tests_on_device")


def test_the_taylor_term_on_paper(device: torch.device) -> None:
    """The sum is (1 * 2)^2 + (3 * 1)^2 + 0."""
    b = torch.tensor([[1.0], [3.0], [5.0]], device=device)
    assert taylor_term(b, torch.tensor([[2.0], [1.0], [0.0]], device=device)) == 13


def test_the_taylor_term_does_not_underflow() -> None:
    assert taylor_term(torch.full((2, 1), 1e-15), torch.full((2, 1), 1e-15)) == pytest.approx(
        2e-60, rel=1e-5
    )


def test_spectral_term_sums_singular_values(device: torch.device) -> None:
    """2 [[1], [2]] [[3, 4]] has the singular value 10 sqrt 5; 3 diag(1, 2) has 3 and 6."""
    one = Factors(
        torch.tensor([[1.0], [2.0]], device=device), torch.tensor([[3.0, 4.0]], device=device), 2.0
    )
    two = Factors(
        torch.tensor([[1.0, 0.0], [0.0, 2.0]], device=device), torch.eye(2, device=device), 3.0
    )
    assert spectral_term(one) == pytest.approx(10 * math.sqrt(5))
    assert spectral_term(two) == pytest.approx(9)


def test_terms_of_other_sizes_count_alike() -> None:
    """The means are 2e-10 and 4, so the results are 1/2 + 6/4 and 3/2 + 2/4."""
    found = comparable({3: Terms(1e-10, 6.0), 1: Terms(3e-10, 2.0)})
    assert found == {3: pytest.approx(2.0), 1: pytest.approx(2.0)}


def test_zero_terms_count_alike_for_all() -> None:
    assert comparable({0: Terms(0.0, 0.0), 1: Terms(0.0, 0.0)}) == {0: 2.0, 1: 2.0}
    assert comparable({0: Terms(0.0, 1.0), 1: Terms(0.0, 3.0)}) == {0: 1.5, 1: 2.5}
    assert comparable({}) == {}


@given(
    st.dictionaries(
        st.integers(0, 9), st.builds(Terms, st.floats(0, 1e300), st.floats(0, 1e300)), min_size=1
    )
)
def test_mean_is_two_in_any_order(terms: dict[int, Terms]) -> None:
    found = comparable(terms)
    assert found == comparable(dict(reversed(terms.items())))
    assert sum(found.values()) / len(found) == pytest.approx(2, rel=1e-6)


def test_what_is_not_finite_is_refused() -> None:
    with pytest.raises(ValueError, match="NaN or infinity"):
        taylor_term(torch.ones(2, 1), torch.full((2, 1), math.nan))
