"""Bounded records: values by hand, and integer norms that never exceed the bound."""

import math

import pytest
import torch

from pruning_kernels.fixed_point import from_words, words_of
from pruning_kernels.record_bound import clipped, normalised

ONE = 2.0**40


def test_vectors_get_norm_one() -> None:
    found = normalised(torch.tensor([[3.0, 4.0], [0.0, 0.0], [0.0, 1e-30]])).double() / ONE
    torch.testing.assert_close(
        found, torch.tensor([[0.6, 0.8], [0.0, 0.0], [0.0, 1.0]]).double(), rtol=0, atol=1e-7
    )


@pytest.mark.parametrize("bound", [0.0, -1.0, 1e-300, math.nan])
def test_a_bound_that_leaves_no_number_is_refused(bound: float) -> None:
    """Otherwise zeros would become the smallest integer, whose sums tell the number of records."""
    with pytest.raises(ValueError, match="is too small"):
        clipped({"a": torch.zeros(3, 4)}, bound)


def test_clipping_looks_at_all_parts_together() -> None:
    """The first record has norm 13 over both parts, the second 0.5."""
    parts = {"a": torch.tensor([[3.0, 4.0], [0.3, 0.4]]), "b": torch.tensor([[[12.0]], [[0.0]]])}
    found = clipped(parts, 2.0)
    expected = {"a": [[3 / 13, 4 / 13], [0.15, 0.2]], "b": [[[12 / 13]], [[0.0]]]}
    for name, values in expected.items():
        torch.testing.assert_close(
            found[name].double() / ONE, torch.tensor(values).double(), rtol=0, atol=1e-7
        )


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_a_record_that_is_not_finite_counts_for_nothing(poison: float) -> None:
    vectors = torch.tensor([[1.0, poison], [1.0, 0.0]])
    assert normalised(vectors)[0].tolist() == [0, 0]
    found = clipped({"a": vectors, "b": torch.ones(2, 1)}, 1.0)
    assert found["a"][0].tolist() == [0, 0]
    assert found["b"][0].tolist() == [0]
    assert found["b"][1].item() > 0


def test_no_integer_norm_exceeds_the_bound() -> None:
    """Exact integers, since float64 could not tell a norm just above the bound."""
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randn(200, 50, generator=generator) * torch.logspace(-20, 20, 200)[:, None]
    for found in (normalised(vectors), clipped({"": vectors}, 1e-3)[""]):
        for row in found.tolist():
            assert sum(number * number for number in row) <= (1 << 40) ** 2


def test_words_are_the_integers() -> None:
    integers = torch.tensor([0, 1, -1, 2**50 + 3, -(2**52)]).numpy()
    assert from_words(words_of(integers), 40).tolist() == (integers / ONE).tolist()
