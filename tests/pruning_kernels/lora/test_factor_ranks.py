"""A client's own choice of a rank, by hand."""

import math

import pytest
import torch

from pruning_kernels.lora.factors import Factors, kept_rank, self_prune_rank, tail_norm
from pruning_kernels.selection.scores import NotFiniteError

pytestmark = pytest.mark.usefixtures("tests_on_device")


def test_the_tail_on_paper(device: torch.device) -> None:
    """Columns of B from 1 on: (3, 4), norm 5; rows of A from 1 on: (0, 2), norm 2.

    The scaling has no effect.
    """
    b = torch.tensor([[9.0, 3.0], [9.0, 4.0]], device=device)
    a = torch.tensor([[9.0, 9.0], [0.0, 2.0]], device=device)
    assert float(tail_norm(Factors(b, a, 7.0), 1)) == pytest.approx(10.0)
    assert float(tail_norm(Factors(b, a, 7.0), 2)) == 0.0
    assert float(tail_norm(Factors(b, a, 7.0), 0)) == pytest.approx(math.sqrt(187) * math.sqrt(166))


def test_the_gradient_of_the_tail_on_paper() -> None:
    """The gradients of 5 * 2 are 2 * (3, 4) / 5 for B's column 1 and 5 * (0, 2) / 2 for A's row 1.

    The first column and row have gradient 0.
    """
    b = torch.nn.Parameter(torch.tensor([[9.0, 3.0], [9.0, 4.0]]))
    a = torch.nn.Parameter(torch.tensor([[9.0, 9.0], [0.0, 2.0]]))
    tail_norm(Factors(b, a, 1.0), 1).backward()  # type: ignore[no-untyped-call]
    assert b.grad is not None
    assert a.grad is not None
    assert b.grad.tolist() == [pytest.approx([0.0, 1.2]), pytest.approx([0.0, 1.6])]
    assert a.grad.tolist() == [[0.0, 0.0], pytest.approx([0.0, 5.0])]


def test_a_tail_of_zeros_has_a_gradient_of_zero() -> None:
    """B is zero before an adapter is trained; the gradient must not be NaN."""
    b = torch.nn.Parameter(torch.zeros(2, 3))
    a = torch.nn.Parameter(torch.ones(3, 2))
    found = tail_norm(Factors(b, a, 1.0), 1)
    found.backward()  # type: ignore[no-untyped-call]
    assert float(found.detach()) == 0.0
    for grad in (b.grad, a.grad):
        assert grad is not None
        assert not grad.any()


@pytest.mark.parametrize(
    ("rank", "gamma", "kept"),
    [
        (8, 0.99, 7),
        (8, 0.5, 4),
        (8, 1.0, 8),
        (50, 0.58, 29),
        (20, 0.95, 19),
        (3, 0.1, 1),
        (1, 0.5, 1),
    ],
)
def test_kept_ranks(rank: int, gamma: float, kept: int) -> None:
    assert kept_rank(rank, gamma) == kept


def tail_of(size: float) -> Factors:
    """Return factors of rank 4 whose last two ranks have a tail of this norm.

    B has four entries of size / 2 there, whose norm is the size, and A four of 1/2, whose norm is
    1.
    """
    half = torch.tensor([1.0, 1.0, size / 2, size / 2])
    return Factors(torch.ones(2, 4) * half, torch.full((4, 2), 0.5), 3.0)


def rank_after(before: float, after: Factors, gamma: float) -> int:
    return self_prune_rank(
        after.rank, gamma, before, float(tail_norm(after, kept_rank(after.rank, gamma)))
    )


def test_rank_is_pruned_if_tail_shrank() -> None:
    assert rank_after(0.75, tail_of(0.5), 0.5) == 2
    assert rank_after(0.5, tail_of(0.5), 0.5) == 4
    assert rank_after(0.25, tail_of(0.5), 0.5) == 4
    assert rank_after(0.0, tail_of(0.0), 0.5) == 4
    assert rank_after(0.75, tail_of(0.5), 1.0) == 4


def test_norms_that_are_not_finite_are_refused() -> None:
    for before in (math.nan, math.inf):
        with pytest.raises(NotFiniteError, match="NaN or infinity"):
            rank_after(before, tail_of(1.0), 0.5)
    with pytest.raises(NotFiniteError, match="NaN or infinity"):
        rank_after(1.0, tail_of(math.nan), 0.5)
