"""SparseGPT against the optimal brain surgeon in float64.

The reference inverts the remaining part of H explicitly at each column.
"""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from pruning_kernels import sparsegpt
from pruning_kernels.selection.scores import NotFiniteError
from pruning_kernels.selection.selection import select_lowest
from pruning_kernels.sparsegpt import Factor, factorise, prune, sparsegpt_score

pytestmark = pytest.mark.usefixtures("compiled_plain_or_cuda")

TOLERANCE = 1e-4
"""Tolerance of updated weights relative to the largest one: float32 against float64."""


def inputs_of(tokens: int, channels: int, seed: int = 0) -> Tensor:
    """Return correlated inputs: white noise times a mixing matrix."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.eye(channels) + torch.randn(channels, channels, generator=generator) / math.sqrt(
        channels
    )
    return torch.randn(tokens, channels, generator=generator) @ mixing


def weight_of(rows: int, columns: int, seed: int = 1) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def damped(gram: Tensor, damping: float = 0.01) -> NDArray[np.float64]:
    """Return H in float64 for a Gram matrix without dead channels."""
    found = gram.double().numpy()
    return found + damping * np.diagonal(found).mean() * np.eye(len(found))


def lowest(scores: NDArray[np.float64], quota: int) -> NDArray[np.bool_]:
    """Return a mask of the ``quota`` lowest scores; ties go to the first."""
    chosen = np.zeros(scores.size, bool)
    chosen[sorted(range(scores.size), key=lambda place: (scores.flat[place], place))[:quota]] = True
    return chosen.reshape(scores.shape)


def brain_surgeon(
    weight: Tensor,
    hessian: NDArray[np.float64],
    sparsity: float,
    pattern: tuple[int, int] | None,
    block_size: int,
) -> tuple[NDArray[np.bool_], NDArray[np.float64], float]:
    """Return mask, weights and smallest relative gap of scores by the slow reference.

    The gap is that between the last pruned and the first kept score. Let ``inverse`` be the inverse
    of H for the columns from j on. Removing weight p of these columns costs ``w_p^2 / inverse_pp``,
    up to a factor, and changes the others by ``-w_p / inverse_pp * inverse_p`` (SparseGPT, eq. 1
    and 3).
    """
    found = weight.double().numpy().copy()
    (rows, columns), pruned = found.shape, np.zeros(found.shape, bool)
    inverses = [np.linalg.inv(hessian[j:, j:]) for j in range(columns)]
    costs = np.array([inverse[0, 0] for inverse in inverses])
    gap = math.inf
    for j in range(columns):
        size = block_size if pattern is None else pattern[1]
        if j % size == 0:
            group = slice(j, min(j + size, columns))
            scores = found[:, group] ** 2 / costs[group]
            if pattern is None:
                parts = [
                    (
                        scores,
                        pruned[:, group],
                        int(rows * group.stop * sparsity) - int(rows * j * sparsity),
                    )
                ]
            else:
                parts = [
                    (scores[row], pruned[row, group], pattern[1] - pattern[0])
                    for row in range(rows)
                ]
            for part, chosen, quota in parts:
                chosen[...] = lowest(part, quota)
                if 0 < quota < part.size:
                    gap = min(gap, part[~chosen].min() / part[chosen].max() - 1)
        for row in np.flatnonzero(pruned[:, j]):
            found[row, j:] -= found[row, j] / inverses[j][0, 0] * inverses[j][0]
            found[row, j] = 0
    return pruned, found, gap


def output_error(weight: Tensor, updated: Tensor, inputs: Tensor) -> float:
    """Return the squared difference of a layer's outputs."""
    return float(((weight - updated).double() @ inputs.double().T).square().sum())


def test_factor_on_paper() -> None:
    """The inverse of [[2, 1], [1, 2]] is [[2, -1], [-1, 2]] / 3.

    So U = [[sqrt(2/3), -1/sqrt(6)], [0, sqrt(1/2)]].
    """
    factor = factorise(torch.tensor([[2.0, 1.0], [1.0, 2.0]]), damping=0.0)
    assert factor.upper.tolist() == [
        pytest.approx([math.sqrt(2 / 3), -1 / math.sqrt(6)]),
        pytest.approx([0.0, math.sqrt(1 / 2)]),
    ]
    assert (factor.damping, factor.dead.tolist()) == (0.0, [False, False])


def test_damping_on_paper() -> None:
    """Half of the mean diagonal 2 is added: H = diag(2, 4) and U = diag(sqrt(1/2), 1/2)."""
    factor = factorise(torch.diag(torch.tensor([1.0, 3.0])), damping=0.5)
    assert factor.upper.tolist() == [
        pytest.approx([math.sqrt(1 / 2), 0.0]),
        pytest.approx([0.0, 0.5]),
    ]


def test_damping_on_paper_where_a_channel_is_dead() -> None:
    """The mean of the diagonals 1 and 3 without the dead one is 2.

    It is (1 + 3 + 8) / 3 = 4 if the dead channel counts as 8.
    """
    gram = torch.diag(torch.tensor([1.0, 3.0, 0.0]))
    left_out = factorise(gram, 0.5)
    counted = factorise(gram, 0.5, dead_diagonal=8.0)
    assert left_out.upper.diagonal().tolist() == pytest.approx(
        [math.sqrt(1 / 2), math.sqrt(1 / 4), 1.0]
    )
    assert counted.upper.diagonal().tolist() == pytest.approx(
        [math.sqrt(1 / 3), math.sqrt(1 / 5), 1.0]
    )


def test_dead_channel_factor_equals_published() -> None:
    """The reference sums H = 2 / n x x^T over n samples, one sample and one token at a time.

    It puts 1 in place of each diagonal element that is 0.
    """
    samples = 6
    tokens = 12
    channels = 10
    inputs = (0.02 * inputs_of(samples * tokens, channels)).reshape(samples, tokens, channels)
    inputs[:, :, [2, 7]] = 0
    hessian = np.zeros((channels, channels))
    for seen, sample in enumerate(inputs.double().numpy()):
        hessian *= seen / (seen + 1)
        for token in sample:
            hessian += 2 / (seen + 1) * np.outer(token, token)
    for channel in range(channels):
        if hessian[channel, channel] == 0:
            hessian[channel, channel] = 1
    hessian += 0.01 * np.mean(np.diag(hessian)) * np.eye(channels)
    expected = np.linalg.cholesky(np.linalg.inv(hessian)).T
    flat = inputs.reshape(-1, channels)
    found = factorise(flat.T @ flat, 0.01, dead_diagonal=samples / 2).upper.numpy() * math.sqrt(
        samples / 2
    )
    live = [channel for channel in range(channels) if channel not in (2, 7)]
    assert found[np.ix_(live, live)] == pytest.approx(
        expected[np.ix_(live, live)], rel=1e-4, abs=1e-5
    )
    left_out = factorise(flat.T @ flat, 0.01).upper.numpy() * math.sqrt(samples / 2)
    assert np.abs(left_out - found)[np.ix_(live, live)].max() > 0.05 * np.abs(expected).max()


def test_pruning_on_paper() -> None:
    """H = [[2, 1], [1, 2]]; one of two weights is pruned.

    The first of [1, 3] costs 1 / (2/3) = 1.5 against 9 / (1/2) = 18. Without it, 2 + 2 d + 2 d^2 is
    minimal at d = -1/2, where d is the second weight minus its new value: 3.5. The first of [3, 1]
    costs 13.5 against 2, so the second is pruned, and the weight on its left stays unchanged.
    """
    factor = factorise(torch.tensor([[2.0, 1.0], [1.0, 2.0]]), damping=0.0)
    for weight, pruned, updated in (
        ([1.0, 3.0], [True, False], [0.0, 3.5]),
        ([3.0, 1.0], [False, True], [3.0, 0.0]),
    ):
        for pattern in (None, (1, 2)):
            prune_mask, found = prune(torch.tensor([weight]), factor, 0.5, pattern)
            assert prune_mask.tolist() == [pruned]
            assert found.tolist() == [pytest.approx(updated)]


def test_score_on_paper() -> None:
    """The diagonal of the inverse is 2/3 in both channels."""
    factor = factorise(torch.tensor([[2.0, 1.0], [1.0, 2.0]]), damping=0.0)
    scores = sparsegpt_score(torch.tensor([[1.0, -3.0]], dtype=torch.bfloat16), factor)
    assert scores.dtype == torch.float32
    assert scores.tolist() == [pytest.approx([1.5, 13.5])]


@pytest.mark.parametrize("channels", [1, 5, 64, 300, 777])
def test_the_factor_is_that_of_the_inverse(channels: int) -> None:
    """Compare with the three steps of the published code, in float64.

    The sizes lie below and above the size from which the recursion halves the matrix.
    """
    gram = inputs_of(2 * channels + 1, channels).T @ inputs_of(2 * channels + 1, channels)
    given = gram.clone()
    factor = factorise(gram)
    expected = np.linalg.cholesky(np.linalg.inv(damped(gram))).T
    np.testing.assert_allclose(
        factor.upper.numpy(), expected, rtol=1e-3, atol=1e-4 * np.abs(expected).max()
    )
    assert torch.equal(factor.upper, factor.upper.triu())
    assert torch.equal(gram, given)
    assert factor.damping == 0.01


@pytest.mark.parametrize("sparsity", [0.3, 0.5, 0.7])
@pytest.mark.parametrize(
    ("rows", "columns", "block_size"),
    [(6, 40, 128), (9, 50, 16), (5, 150, 128), (4, 96, 8), (3, 21, 1)],
)
def test_equals_the_brain_surgeon(
    rows: int, columns: int, block_size: int, sparsity: float
) -> None:
    inputs = inputs_of(3 * columns, columns)
    weight = weight_of(rows, columns)
    gram = inputs.T @ inputs
    pruned, expected, gap = brain_surgeon(weight, damped(gram), sparsity, None, block_size)
    assert gap > 1e-5, "scores so close that rounding decides: choose another seed"
    prune_mask, updated = prune(weight, factorise(gram), sparsity, block_size=block_size)
    assert np.array_equal(prune_mask.numpy(), pruned)
    assert updated.numpy() == pytest.approx(expected, abs=TOLERANCE * np.abs(expected).max())


@pytest.mark.parametrize("pattern", [(2, 4), (4, 8), (1, 2), (3, 5)])
@pytest.mark.parametrize("blocks", [1, 2, 7])
def test_patterns_equal_the_brain_surgeon(pattern: tuple[int, int], blocks: int) -> None:
    inputs = inputs_of(300, 80)
    weight = weight_of(6, 80)
    gram = inputs.T @ inputs
    pruned, expected, gap = brain_surgeon(weight, damped(gram), 0.0, pattern, 128)
    assert gap > 1e-5, "scores so close that rounding decides: choose another seed"
    prune_mask, updated = prune(
        weight, factorise(gram), 0.0, pattern, block_size=blocks * pattern[1]
    )
    assert np.array_equal(prune_mask.numpy(), pruned)
    assert updated.numpy() == pytest.approx(expected, abs=TOLERANCE * np.abs(expected).max())
    n, m = pattern
    assert (prune_mask.reshape(-1, m).sum(dim=1) == m - n).all()


def test_both_ways_agree_on_several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = inputs_of(1200, 900)
    weight = weight_of(70, 900)
    factor = factorise(inputs.T @ inputs)
    for pattern in (None, (2, 4)):
        found = []
        for worth in (0, 1 << 62):
            monkeypatch.setattr(sparsegpt, "WORTH_COMPILING", worth)
            found.append(prune(weight, factor, 0.6, pattern, block_size=100 if pattern else 130))
        (mask, updated), (plain_mask, plain) = found
        assert torch.equal(mask, plain_mask)
        assert updated.numpy() == pytest.approx(plain.numpy(), abs=1e-5 * float(plain.abs().max()))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 7), st.integers(1, 40), st.floats(0, 0.999), st.integers(1, 17))
def test_exact_sparsity(rows: int, columns: int, sparsity: float, block_size: int) -> None:
    """The sparsity is exact after every block; all scores are equal and nothing is updated."""
    prune_mask, updated = prune(
        torch.ones(rows, columns), factorise(torch.eye(columns)), sparsity, block_size=block_size
    )
    for end in [*range(block_size, columns, block_size), columns]:
        assert int(prune_mask[:, :end].sum()) == int(rows * end * sparsity)
    assert torch.equal(updated == 0, prune_mask)
    assert torch.equal(updated, (~prune_mask).float())


def test_ties_take_lower_index_in_block() -> None:
    """Blocks of 2 x 2 lose int(4 * 0.75) = 3 weights: the upper row and one below it."""
    prune_mask, _ = prune(torch.ones(2, 4), factorise(torch.eye(4)), 0.75, block_size=2)
    assert prune_mask.tolist() == [[True, True, True, True], [True, False, True, False]]


@pytest.mark.parametrize("pattern", [None, (2, 4)])
def test_dead_channels_go_first_without_effect(pattern: tuple[int, int] | None) -> None:
    """Weights of dead channels become zero and do not affect the other weights."""
    inputs = inputs_of(200, 40)
    inputs[:, [3, 17, 18]] = 0
    factor = factorise(inputs.T @ inputs)
    assert factor.dead.nonzero().flatten().tolist() == [3, 17, 18]
    weight = 10 * weight_of(8, 40)
    prune_mask, updated = prune(weight, factor, 0.5, pattern, block_size=20)
    assert prune_mask[:, factor.dead].all()
    assert (updated[:, factor.dead] == 0).all()
    assert (sparsegpt_score(weight, factor)[:, factor.dead] == 0).all()
    other = prune(weight * ~factor.dead, factor, 0.5, pattern, block_size=20)
    assert torch.equal(updated, other[1])


def test_dead_channels_that_stay_are_zero() -> None:
    inputs = inputs_of(200, 8)
    inputs[:, 2] = 0
    prune_mask, updated = prune(torch.ones(2, 8), factorise(inputs.T @ inputs), 0.0)
    assert not prune_mask.any()
    assert updated.tolist() == [[1.0, 1.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0]] * 2


def test_a_layer_without_inputs_can_be_pruned() -> None:
    prune_mask, updated = prune(torch.ones(2, 3), factorise(torch.zeros(3, 3)), 0.5)
    assert (int(prune_mask.sum()), int(updated.count_nonzero())) == (3, 0)


def test_damping_is_raised_for_a_singular_gram() -> None:
    """The Gram matrix of two equal channels has no factor; with the paper's damping it has one."""
    assert factorise(torch.ones(2, 2), damping=0.0).damping == 0.01


def test_damping_is_raised_tenfold_as_needed() -> None:
    """The eigenvalues are 2.04 and -0.04, as rounding may produce, so damping must exceed 0.04."""
    factor = factorise(torch.tensor([[1.0, 1.04], [1.04, 1.0]]), damping=0.003)
    assert factor.damping == pytest.approx(0.3)
    assert factor.upper[1, 1].item() == pytest.approx(1 / math.sqrt(1.3))


def test_what_is_no_gram_is_refused() -> None:
    with pytest.raises(ValueError, match=r"damping 1\.0"):
        factorise(torch.tensor([[1.0, 5.0], [5.0, 1.0]]))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [(0, 0), (0, 2), (2, 1)])
def test_grams_that_are_not_finite_are_refused(bad: float, place: tuple[int, int]) -> None:
    gram = torch.eye(3)
    gram[place] = bad
    with pytest.raises(NotFiniteError, match="activations"):
        factorise(gram)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_weights_that_are_not_finite_are_refused(bad: float) -> None:
    with pytest.raises(NotFiniteError, match="weights"):
        prune(torch.tensor([[1.0, bad]]), factorise(torch.eye(2)), 0.5)


@pytest.mark.parametrize(("pattern", "block_size"), [((1, 3), 9), ((2, 4), 6)])
def test_pattern_not_dividing_blocks_is_refused(pattern: tuple[int, int], block_size: int) -> None:
    with pytest.raises(ValueError, match="does not divide"):
        prune(torch.ones(2, 8), factorise(torch.eye(8)), 0.5, pattern, block_size)


@pytest.mark.parametrize("scale", [4.0**-20, 1 / 128, 3.0, 4.0**20])
def test_the_scale_of_the_gram_does_not_matter(scale: float) -> None:
    """Sums and means over tokens prune alike, also with a dead channel.

    Factors that are powers of four change no bit.
    """
    inputs = inputs_of(300, 60)
    inputs[:, 7] = 0
    weight = weight_of(9, 60)
    gram = inputs.T @ inputs
    prune_mask, updated = prune(weight, factorise(gram), 0.5)
    scaled_mask, scaled = prune(weight, factorise(gram * scale), 0.5)
    assert torch.equal(prune_mask, scaled_mask)
    assert scaled.numpy() == pytest.approx(
        updated.numpy(), rel=0 if scale in (4.0**-20, 4.0**20) else 1e-3, abs=1e-5
    )


@pytest.mark.parametrize("pattern", [None, (2, 4)])
def test_updates_lower_the_error_of_the_outputs(pattern: tuple[int, int] | None) -> None:
    """The error is below that of the same mask without updates and of magnitude pruning."""
    inputs = inputs_of(400, 160)
    weight = weight_of(30, 160)
    prune_mask, updated = prune(weight, factorise(inputs.T @ inputs), 0.5, pattern, block_size=32)
    by_magnitude = select_lowest(weight.abs(), 0.5, "2:4" if pattern else "layer")
    assert (updated[prune_mask] == 0).all()
    assert updated.dtype == torch.float32
    found = output_error(weight, updated, inputs)
    assert found < 0.8 * output_error(weight, weight * ~prune_mask, inputs)
    assert found < 0.8 * output_error(weight, weight * ~by_magnitude, inputs)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_given_weights_of_any_dtype_are_unchanged(dtype: torch.dtype) -> None:
    inputs = inputs_of(100, 24)
    factor = factorise(inputs.T @ inputs)
    weight = weight_of(24, 5).to(dtype).T
    given = weight.clone()
    prune_mask, updated = prune(weight, factor, 0.5)
    expected_mask, expected = prune(given.float().contiguous(), factor, 0.5)
    assert torch.equal(weight, given)
    assert torch.equal(prune_mask, expected_mask)
    assert torch.equal(updated, expected)


def test_repeated_runs_have_the_same_bits() -> None:
    inputs = inputs_of(700, 600)
    weight = weight_of(40, 600)
    results = [prune(weight, factorise(inputs.T @ inputs), 0.5, block_size=64) for _ in range(2)]
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def test_factor_holds_for_layers_of_its_inputs() -> None:
    """The weights of a row do not depend on other rows if each row has its own groups."""
    inputs = inputs_of(200, 32)
    factor: Factor = factorise(inputs.T @ inputs)
    weight = weight_of(6, 32)
    prune_mask, updated = prune(weight, factor, 0.0, (2, 4))
    for half in (slice(0, 3), slice(3, 6)):
        local_baseline_mask, alone = prune(weight[half], factor, 0.0, (2, 4))
        assert torch.equal(local_baseline_mask, prune_mask[half])
        assert alone.numpy() == pytest.approx(updated[half].numpy(), abs=1e-5)
