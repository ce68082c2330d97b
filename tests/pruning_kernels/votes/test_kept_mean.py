"""Weighted means of kept weights, compared with values by hand and slow loops."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pruning_kernels.votes import kept_mean as means
from pruning_kernels.votes.bitmask import pack
from pruning_kernels.votes.kept_mean import KeptMean, SummedMean, kept_mean
from tests.devices import CPU, DEVICES, working_on

pytestmark = pytest.mark.usefixtures("place_of_sums")


@pytest.fixture(params=["compiled", "plain", "torch", DEVICES[1]], scope="module")
def place_of_sums(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run both CPU implementations, the device code on CPU tensors, and a CUDA device."""
    device = request.param if isinstance(request.param, torch.device) else CPU
    with pytest.MonkeyPatch.context() as monkeypatch, working_on(device):
        monkeypatch.setattr(means, "WORTH_COMPILING", 0 if request.param == "compiled" else 1 << 62)
        if request.param not in ("compiled", "plain"):
            monkeypatch.setattr(means, "KeptMean", lambda shape: means.DeviceMean(shape, device))
        yield


def added(matrices: list[np.ndarray], masks: list[np.ndarray], weights: list[float]) -> KeptMean:
    total = kept_mean(matrices[0].shape)
    for matrix, mask, weight in zip(matrices, masks, weights, strict=True):
        total.add(pack(mask), matrix[~mask], weight)
    return total


def test_by_hand() -> None:
    """Three clients and four weights, kept by three, two, one and none of them."""
    matrices = [
        np.array([[3.0, 1.0, 5.0, 7.0]]),
        np.array([[6.0, 2.0, 5.0, 7.0]]),
        np.array([[9.0, 4.0, 5.0, 7.0]]),
    ]
    masks = [
        np.array([[False, True, False, True]]),
        np.array([[False, False, True, True]]),
        np.array([[False, False, True, True]]),
    ]
    given_matrices = [matrix.astype(np.float32) for matrix in matrices]
    assert added(given_matrices, masks, [1, 1, 1]).mean().tolist() == [[6.0, 3.0, 5.0, 0.0]]
    assert added(given_matrices, masks, [1, 1, 1]).mean("mean").tolist() == [
        [6.0, 2.0, np.float32(5) / np.float32(3), 0.0]
    ]
    # Client 1 has two samples, the others one: (3 + 12 + 9) / 4, (4 + 4) / 3, 5 / 1, and no client.
    assert added(given_matrices, masks, [1, 2, 1]).mean().tolist() == [
        [6.0, np.float32(8) / np.float32(3), 5.0, 0.0]
    ]


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 5), st.tuples(st.integers(1, 9), st.integers(1, 80)), st.integers(0, 2**32 - 1)
)
def test_against_a_slow_loop(clients: int, shape: tuple[int, int], seed: int) -> None:
    generator = np.random.default_rng(seed)
    matrices = [generator.normal(size=shape).astype(np.float32) for _ in range(clients)]
    masks = [generator.random(shape) < 0.5 for _ in range(clients)]
    weights = [float(weight) for weight in generator.integers(1, 9, clients)]
    found = added(matrices, masks, weights).mean()
    for row, column in np.ndindex(shape):
        kept = [
            (w, m[row, column])
            for w, m, mask in zip(weights, matrices, masks, strict=True)
            if not mask[row, column]
        ]
        expected = (
            sum(w * float(value) for w, value in kept) / sum(w for w, _ in kept) if kept else 0.0
        )
        assert found[row, column] == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_many_words_and_an_unfinished_last_one() -> None:
    """There are more words than in one tile of the compiled kernel.

    So some threads start inside the matrix.
    """
    generator = np.random.default_rng(0)
    shape = (601, 1009)
    matrix = generator.normal(size=shape).astype(np.float32)
    mask = generator.random(shape) < 0.6
    assert np.array_equal(added([matrix], [mask], [1.0]).mean(), np.where(mask, 0, matrix))


@pytest.mark.parametrize("clients", [1, 2, 4])
def test_equal_clients_give_what_each_of_them_has(clients: int) -> None:
    generator = np.random.default_rng(1)
    matrix = generator.normal(size=(7, 13)).astype(np.float32)
    mask = generator.random((7, 13)) < 0.5
    found = added([matrix] * clients, [mask] * clients, [1.0] * clients).mean()
    assert np.array_equal(found, np.where(mask, 0, matrix))


def test_wrong_number_of_kept_weights_is_refused() -> None:
    with pytest.raises(ValueError, match="keeps 3 weights"):
        kept_mean((2, 2)).add(
            pack(np.array([[True, False], [False, False]])), np.ones(2, np.float32)
        )


def test_every_place_gives_the_bits_of_plain_sums() -> None:
    generator = np.random.default_rng(2)
    shape = (37, 61)
    clients = 5
    matrices = [
        (generator.normal(size=shape) * 10.0 ** generator.integers(-30, 30, shape)).astype(
            np.float32
        )
        for _ in range(5)
    ]
    masks = [generator.random(shape) < 0.5 for _ in range(clients)]
    total = np.zeros(shape, np.float32)
    keepers = np.zeros(shape, np.float32)
    for matrix, mask, weight in zip(matrices, masks, range(1, 6), strict=True):
        total += np.where(mask, np.float32(0), matrix * np.float32(weight))
        keepers += ~mask * np.float32(weight)
    expected = np.divide(total, keepers, out=np.zeros_like(total), where=keepers > 0)
    assert added(matrices, masks, [1, 2, 3, 4, 5]).mean().tobytes() == expected.tobytes()


def test_mean_of_known_sums_by_hand() -> None:
    """The sums of ``test_by_hand``: kept by three, two, one and none of three clients."""
    total = np.array([18.0, 6.0, 5.0, 0.0])
    keepers = np.array([3, 2, 1, 0])
    mean = SummedMean((2, 2), total, keepers, 3)
    assert mean.mean().tolist() == [[6.0, 3.0], [5.0, 0.0]]
    assert mean.mean("mean").tolist() == [[6.0, 2.0], [pytest.approx(5 / 3), 0.0]]
    assert mean.mean().dtype == np.float32
