"""Mask of one client for one matrix, compared with values computed by hand."""

import math

import numpy as np
import pytest
import torch

from pruning_kernels.selection import selection
from pruning_kernels.selection.comparison_groups import ComparisonGroup
from pruning_kernels.selection.local_pruning import LocalPruning
from pruning_kernels.selection.scores import NotFiniteError
from pruning_kernels.sparsegpt import factorise
from tests.devices import NEEDS_CUDA

WEIGHT = torch.tensor([[1.0, -2.0, 4.0, 3.0], [-3.0, 0.5, -6.0, 1.0]])
SQUARE_SUM = torch.tensor([9.0, 16.0, 0.25, 0.0])
"""Norms 3, 4, 0.5 and 0, so Wanda's scores are [[3, 8, 2, 0], [9, 2, 3, 0]]."""


@pytest.mark.parametrize(
    ("metric", "group", "expected"),
    [
        ("wanda", "row", [[0, 0, 1, 1], [0, 1, 0, 1]]),
        ("wanda", "layer", [[0, 0, 1, 1], [0, 1, 0, 1]]),
        ("wanda", "column", [[1, 0, 1, 0], [0, 1, 0, 1]]),
        ("magnitude", "row", [[1, 1, 0, 0], [0, 1, 0, 1]]),
        ("magnitude", "layer", [[1, 1, 0, 0], [0, 1, 0, 1]]),
        ("magnitude", "column", [[1, 0, 1, 0], [0, 1, 0, 1]]),
    ],
)
def test_half_of_the_weights_on_paper(
    device: torch.device, metric: str, group: ComparisonGroup, expected: list[list[int]]
) -> None:
    mask = LocalPruning(metric, 0.5, group).prune_mask(WEIGHT.to(device), SQUARE_SUM.to(device))  # type: ignore[arg-type]
    assert mask.int().tolist() == expected


@pytest.mark.parametrize("large", [False, True], ids=["plain", "compiled"])
@pytest.mark.parametrize("group", ["layer", "row", "column", "2:4"])
@pytest.mark.parametrize("metric", ["wanda", "magnitude", "ria", "sparsegpt"])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_weight_that_is_not_finite_is_refused(
    monkeypatch: pytest.MonkeyPatch, metric: str, group: ComparisonGroup, bad: float, large: bool
) -> None:
    """Covers a channel whose inputs are all zero and a matrix without other faults."""
    if large:
        monkeypatch.setattr(selection, "WORTH_COMPILING", 1)
    for channel in (0, 3):
        weight = WEIGHT.clone()
        weight[1, channel] = bad
        inputs = factorise(torch.diag(SQUARE_SUM)) if metric == "sparsegpt" else SQUARE_SUM
        with pytest.raises(NotFiniteError, match="NaN or infinity"):
            LocalPruning(metric, 0.5, group).prune_mask(weight, inputs)  # type: ignore[arg-type]


@pytest.mark.parametrize("large", [False, True], ids=["plain", "compiled"])
@pytest.mark.parametrize("group", ["layer", "row", "column", "2:4"])
def test_ria_against_a_slow_loop(
    monkeypatch: pytest.MonkeyPatch, group: ComparisonGroup, large: bool
) -> None:
    """Scores in float64, one weight at a time; some rows and columns are zero, some rows tie."""
    if large:
        monkeypatch.setattr(selection, "WORTH_COMPILING", 1)
    generator = np.random.default_rng(3)
    weight = generator.standard_normal((130, 24)).astype(np.float32)
    weight[7] = 0
    weight[:, 5] = 0
    weight[90] = weight[20]
    square_sum = generator.random(24) * 9
    scores = np.zeros(weight.shape)
    for i, j in np.argwhere(weight != 0):
        size = abs(float(weight[i, j]))
        shares = (
            size / np.abs(weight[:, j].astype(float)).sum()
            + size / np.abs(weight[i].astype(float)).sum()
        )
        scores[i, j] = shares * square_sum[j] ** 0.25
    found = (
        LocalPruning("ria", 0.4, group)
        .prune_mask(torch.from_numpy(weight), torch.from_numpy(square_sum))
        .numpy()
    )
    size = {"layer": 130 * 24, "row": 24, "column": 130, "2:4": 4}[group]
    lines = (scores.T if group == "column" else scores).reshape(-1, size)
    masks = (found.T if group == "column" else found).reshape(-1, size)
    pruned = 2 if group == "2:4" else int(size * 0.4)
    for line, mask in zip(lines, masks, strict=True):
        assert mask.sum() == pruned
        assert line[mask].max() <= line[~mask].min() * (1 + 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("group", ["layer", "row", "column", "2:4"])
def test_ria_has_the_same_bits_without_scores(
    monkeypatch: pytest.MonkeyPatch, group: ComparisonGroup, dtype: torch.dtype
) -> None:
    """Few distinct weights, so that scores tie, and some channels whose inputs are all zero."""
    generator = torch.Generator().manual_seed(5)
    weight = (torch.randn(200, 132, generator=generator) * 4).round().to(dtype) / 8
    square_sum = torch.randint(0, 3, (132,), generator=generator).to(torch.float64)
    local = LocalPruning("ria", 0.5, group)
    found = []
    for worth in (1, 1 << 62):
        monkeypatch.setattr(selection, "WORTH_COMPILING", worth)
        found.append(local.prune_mask(weight, square_sum))
    assert torch.equal(*found)


def test_groups_differ_for_rows_of_unlike_scale(device: torch.device) -> None:
    weight = torch.tensor([[1.0, 2.0], [10.0, 20.0]], device=device)
    ones = torch.ones(2, device=device)
    assert LocalPruning("wanda", 0.5, "layer").prune_mask(weight, ones).tolist() == [
        [True, True],
        [False, False],
    ]
    assert LocalPruning("wanda", 0.5, "row").prune_mask(weight, ones).tolist() == [
        [True, False],
        [True, False],
    ]


def test_magnitude_ignores_activations(device: torch.device) -> None:
    nonsense = torch.full((4,), float("nan"), device=device)
    mask = LocalPruning("magnitude", 0.5, "row").prune_mask(WEIGHT.to(device), nonsense)
    assert mask.int().tolist() == [[1, 1, 0, 0], [0, 1, 0, 1]]


def test_the_weights_are_left_as_they_were(device: torch.device) -> None:
    weight = WEIGHT.to(device, copy=True)
    LocalPruning("wanda", 0.75, "layer").prune_mask(weight, SQUARE_SUM.to(device))
    assert torch.equal(weight.cpu(), WEIGHT)


def test_wanda_by_column_is_magnitude(device: torch.device) -> None:
    """A channel of norm zero would make all scores of its column tie.

    The masks of clients with and without that channel would then differ.
    """
    weight = torch.randn(64, 8, generator=torch.Generator().manual_seed(0)).to(device)
    norms = torch.ones(8, dtype=torch.float64, device=device)
    norms[3] = 0
    wanda = LocalPruning("wanda", 0.5, "column").prune_mask(weight, norms)
    assert torch.equal(wanda, LocalPruning("magnitude", 0.5, "column").prune_mask(weight, norms))


@NEEDS_CUDA
@pytest.mark.parametrize("metric", ["wanda", "magnitude"])
@pytest.mark.parametrize("group", ["layer", "row", "column", "2:4"])
def test_a_cuda_device_gives_the_bits_of_the_cpu(metric: str, group: ComparisonGroup) -> None:
    """These scores are rounded once each on every device.

    The sums of RIA are not, so only its selection gives the same bits.
    """
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(1200, 1000, generator=generator).to(torch.bfloat16)
    square_sum = torch.rand(1000, generator=generator, dtype=torch.float64)
    local = LocalPruning(metric, 0.6, group)  # type: ignore[arg-type]
    on_device = local.prune_mask(weight.cuda(), square_sum.cuda())
    assert torch.equal(on_device.cpu(), local.prune_mask(weight, square_sum))
