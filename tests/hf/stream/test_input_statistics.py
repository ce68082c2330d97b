"""Gram matrices of the inputs of linears."""

import pytest
import torch
from torch import nn

from espalier.hf.stream.input_statistics import InputGrams, InputSquareSums, watch_for
from pruning_kernels.selection.local_pruning import LocalPruning
from pruning_kernels.sparsegpt import Factor, factorise

pytestmark = pytest.mark.usefixtures("tests_on_device")


def test_grams_on_paper(device: torch.device) -> None:
    """Tokens (1, 2), (3, -1) and (10, 0) give 1 + 9 + 100, 2 - 3 + 0 and 4 + 1 + 0."""
    linear = nn.Linear(2, 1, device=device)
    grams = InputGrams({"a": linear})
    with grams.watching():
        linear(torch.tensor([[[1.0, 2.0], [3.0, -1.0]]]))
        linear(torch.tensor([[[10.0, 0.0]]]))
    assert grams.grams["a"].tolist() == [[110.0, -1.0], [-1.0, 5.0]]
    factor = factorise(grams.grams["a"].clone(), 0.01)
    assert torch.equal(grams.found()["a"].upper, factor.upper)
    assert grams.grams == {}


def test_dead_channels_count_as_half_if_set(
    device: torch.device,
) -> None:
    """A dead diagonal of half the number of samples makes the diagonal of H 1.

    H is the Gram matrix times 2 / samples (see ``factorise``).
    """
    linear = nn.Linear(2, 1, device=device)
    watch = watch_for(LocalPruning("sparsegpt", 0.5, "layer", damping_mean="all"))
    grams = watch({"a": linear})
    grams.samples = 6
    with grams.watching():
        linear(torch.tensor([[[1.0, 0.0], [3.0, 0.0]]]))
    expected = factorise(
        torch.tensor([[10.0, 0.0], [0.0, 0.0]], device=device), 0.01, dead_diagonal=3.0
    )
    found = grams.found()["a"]
    assert isinstance(found, Factor)
    assert torch.equal(found.upper, expected.upper)


def test_linears_of_one_input_share_a_gram(device: torch.device) -> None:
    first, second, third = (nn.Linear(2, 1, device=device) for _ in range(3))
    grams = InputGrams({"first": first, "second": second, "third": third})
    shared = torch.randn(1, 4, 2)
    other = torch.randn(1, 4, 2)
    with grams.watching():
        first(shared)
        second(shared)
        third(other)
    assert set(grams.grams) == {"first", "third"}
    found = grams.found()
    assert found["first"] is found["second"]
    assert not torch.equal(found["first"].upper, found["third"].upper)


def test_input_shared_only_once_is_an_error(device: torch.device) -> None:
    first = nn.Linear(2, 1, device=device)
    second = nn.Linear(2, 1, device=device)
    grams = InputGrams({"first": first, "second": second})
    shared = torch.randn(1, 4, 2)
    with grams.watching():
        first(shared)
        second(shared)
        first(shared)
        with pytest.raises(RuntimeError, match="second shares its input"):
            second(torch.randn(1, 4, 2))


def test_low_precision_is_multiplied_in_float32(device: torch.device) -> None:
    """300 squared is 90000, which exceeds the range of float16."""
    linear = nn.Linear(1, 1, dtype=torch.float16, device=device)
    grams = InputGrams({"a": linear})
    with grams.watching():
        linear(torch.full((1, 2, 1), 300.0, dtype=torch.float16))
    assert grams.grams["a"].tolist() == [[180000.0]]


def test_what_is_watched_is_what_pruning_needs(device: torch.device) -> None:
    linears = {"a": nn.Linear(1, 1, device=device)}
    assert isinstance(watch_for(LocalPruning("sparsegpt", 0.5, "layer"))(linears), InputGrams)
    assert isinstance(watch_for(LocalPruning("wanda", 0.5, "layer"))(linears), InputSquareSums)
