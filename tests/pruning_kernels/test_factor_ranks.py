"""Ranks that shrink and grow, and the client's own choice of a rank, by hand and bit by bit."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pruning_kernels.lora.factor_ranks import grow, kept_rank, self_prune_rank, shrink, tail_norm
from pruning_kernels.lora.factors import Factors, product
from pruning_kernels.selection.scores import NotFiniteError

pytestmark = pytest.mark.usefixtures("tests_on_device")


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def drawn(rows: int, columns: int, rank: int, seed: int = 0) -> Factors:
    numbers = generator(seed)
    return Factors(
        torch.randn(rows, rank, generator=numbers),
        torch.randn(rank, columns, generator=numbers),
        0.5,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("extra", [0, 1, 5])
def test_shrinking_what_grew_gives_the_same_bits(dtype: torch.dtype, extra: int) -> None:
    before = Factors(
        torch.randn(6, 3, generator=generator()).to(dtype),
        torch.randn(3, 4, generator=generator(1)).to(dtype),
        0.5,
    )
    grown = grow(before, 3 + extra, generator(2), 0.02)
    after = shrink(grown, 3)
    assert (grown.rank, grown.scaling, after.scaling) == (3 + extra, 0.5, 0.5)
    assert torch.equal(after.b, before.b)
    assert torch.equal(after.a, before.a)
    assert {after.b.dtype, after.a.dtype, grown.b.dtype, grown.a.dtype} == {dtype}


def test_growing_adds_zeros_to_b_and_normal_rows_to_a(device: torch.device) -> None:
    """The new rows have the generator's numbers; the standard deviation of 4000 is about 0.02."""
    before = Factors(torch.ones(2, 1, device=device), torch.ones(1, 1000, device=device), 2.0)
    grown = grow(before, 5, generator(), 0.02)
    assert not grown.b[:, 1:].any()
    assert (
        grown.a[1:].cpu().tolist() == (torch.randn(4, 1000, generator=generator()) * 0.02).tolist()
    )
    assert float(grown.a[1:].std()) == pytest.approx(0.02, rel=0.1)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 5), st.integers(0, 5), st.integers(0, 2**32 - 1))
def test_growing_leaves_the_update_as_it_is(rank: int, extra: int, seed: int) -> None:
    """Sums of whole numbers have no rounding error in any order."""
    numbers = generator(seed)
    b, a = (
        torch.randint(-50, 50, shape, generator=numbers).float() for shape in ((6, rank), (rank, 7))
    )
    before = Factors(b, a, 0.5)
    assert torch.equal(product(grow(before, rank + extra, numbers, 1.0)), product(before))


def test_shrinking_copies_the_first_ranks() -> None:
    before = drawn(4, 5, 3)
    found = shrink(before, 2)
    assert found.b.tolist() == [line[:2] for line in before.b.tolist()]
    assert found.a.tolist() == before.a.tolist()[:2]
    assert found.b.is_contiguous()
    before.b.zero_()
    before.a.zero_()
    assert found.b.all()
    assert found.a.all()


def test_ranks_that_do_not_fit_are_refused() -> None:
    before = drawn(4, 5, 3)
    for rank in (0, 4):
        with pytest.raises(ValueError, match=f"from 1 to 3, not to {rank}"):
            shrink(before, rank)
    with pytest.raises(ValueError, match="do not grow to rank 2"):
        grow(before, 2, generator(), 0.02)
    for std in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="std has to be a finite number of at least 0"):
            grow(before, 4, generator(), std)


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


@pytest.mark.parametrize("first", [-1, 3])
def test_a_tail_that_starts_elsewhere_is_refused(first: int) -> None:
    with pytest.raises(ValueError, match=f"starts at 0 to 2, not at {first}"):
        tail_norm(drawn(3, 3, 2), first)


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


@pytest.mark.parametrize("gamma", [0.0, -0.5, 1.01, math.nan])
def test_a_gamma_that_is_no_share_is_refused(gamma: float) -> None:
    with pytest.raises(ValueError, match="gamma has to lie above 0 and not above 1"):
        kept_rank(8, gamma)


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


def test_a_client_prunes_its_rank_where_the_tail_has_shrunk() -> None:
    assert rank_after(0.75, tail_of(0.5), 0.5) == 2
    assert rank_after(0.5, tail_of(0.5), 0.5) == 4
    assert rank_after(0.25, tail_of(0.5), 0.5) == 4
    assert rank_after(0.0, tail_of(0.0), 0.5) == 4
    assert rank_after(0.75, tail_of(0.5), 1.0) == 4


def test_refusals_of_self_pruning() -> None:
    with pytest.raises(ValueError, match="norms have to be at least 0"):
        rank_after(-1.0, tail_of(1.0), 0.5)
    for before in (math.nan, math.inf):
        with pytest.raises(NotFiniteError, match="NaN or infinity"):
            rank_after(before, tail_of(1.0), 0.5)
    with pytest.raises(NotFiniteError, match="NaN or infinity"):
        rank_after(1.0, tail_of(math.nan), 0.5)
    with pytest.raises(ValueError, match="rank has to be at least 1, got 0"):
        kept_rank(0, 0.5)
