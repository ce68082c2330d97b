"""Input norms and block-by-block pruning against the whole model (see also ``family_contract``)."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from espalier.hf.machine.computing import Computing
from espalier.hf.opening.opened_model import OpenedModel, open_model
from espalier.hf.stream.block_stream import BlockStream
from espalier.hf.stream.calibration import prune_by_block, prune_layers
from espalier.hf.stream.input_statistics import InputSquareSums
from pruning_kernels import sparsegpt
from pruning_kernels.selection.local_pruning import LocalPruning
from tests.hf.tiny_models import CPU, token_sequences, whole_model
from tests.largest_tensor import LargestTensor


def nothing(weight: Tensor, _: Tensor) -> Tensor:
    return torch.zeros(weight.shape, dtype=torch.bool, device=weight.device)


def everything(weight: Tensor, _: Tensor) -> Tensor:
    return torch.ones(weight.shape, dtype=torch.bool, device=weight.device)


# ----- input norms --------------------------------------------------------------------------------


def test_sums_on_paper(device: torch.device) -> None:
    """Two batches, of two sequences and of one, with two channels."""
    linear = nn.Linear(2, 1, device=device)
    sums = InputSquareSums({"a": linear})
    with sums.watching():
        linear(torch.tensor([[[1.0, 2.0], [3.0, -1.0]], [[0.0, 0.5], [2.0, 0.0]]], device=device))
        linear(torch.tensor([[[10.0, 0.0]]], device=device))
    assert sums.sums["a"].dtype == torch.float64
    assert sums.sums["a"].tolist() == [1 + 9 + 0 + 4 + 100, 4 + 1 + 0.25 + 0 + 0]


def test_nothing_is_added_outside_of_watching(device: torch.device) -> None:
    linear = nn.Linear(2, 1, device=device)
    sums = InputSquareSums({"a": linear})
    linear(torch.ones(1, 1, 2, device=device))
    with pytest.raises(RuntimeError), sums.watching():
        raise RuntimeError
    linear(torch.ones(1, 1, 2, device=device))
    assert sums.sums["a"].tolist() == [0.0, 0.0]
    assert not linear._forward_pre_hooks


def test_only_shared_inputs_are_reused(device: torch.device) -> None:
    """The shortcut for query, key and value must not reuse the input of another linear."""
    first = nn.Linear(1, 1, device=device)
    second = nn.Linear(1, 1, device=device)
    third = nn.Linear(1, 1, device=device)
    sums = InputSquareSums({"first": first, "second": second, "third": third})
    shared = torch.full((1, 2, 1), 3.0, device=device)
    other = torch.full((1, 2, 1), 2.0, device=device)
    with sums.watching():
        first(shared)
        second(shared)
        third(other)
        first(shared)
    assert {name: value.item() for name, value in sums.sums.items()} == {
        "first": 36.0,
        "second": 18.0,
        "third": 8.0,
    }


def test_a_later_watch_is_added_to_an_earlier_one(device: torch.device) -> None:
    linear = nn.Linear(1, 1, device=device)
    sums = InputSquareSums({"a": linear})
    for value in (2.0, 3.0):
        with sums.watching():
            linear(torch.full((1, 1, 1), value, device=device))
    assert sums.sums["a"].item() == 13.0


def test_low_precision_is_squared_in_float32(device: torch.device) -> None:
    """300 squared is 90000, which exceeds the range of float16."""
    linear = nn.Linear(1, 1, dtype=torch.float16, device=device)
    sums = InputSquareSums({"a": linear})
    with sums.watching():
        linear(torch.full((1, 2, 1), 300.0, dtype=torch.float16, device=device))
    assert sums.sums["a"].item() == 180000.0


@torch.no_grad()
def test_dense_sums_equal_those_of_hooks(untied: Path, computing: Computing) -> None:
    samples = token_sequences(10, 6)
    found: dict[int, dict[str, list[float]]] = {}
    recorded: list[Tensor] = []

    def record(weight: Tensor, square_sum: Tensor) -> Tensor:
        recorded.append(square_sum.clone())
        return nothing(weight, square_sum)

    for index, masks in prune_by_block(
        BlockStream(OpenedModel(untied), computing), samples, record
    ):
        found[index] = {name: recorded.pop(0).tolist() for name in masks}

    paths = OpenedModel(untied).family.linears
    model = whole_model(untied)
    expected: dict[tuple[int, str], list[float]] = {}

    def hook(key: tuple[int, str]) -> Callable[..., None]:
        def add(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            sums = expected.setdefault(key, [0.0] * inputs[0].shape[-1])
            for token in inputs[0].flatten(0, -2).tolist():
                for channel, value in enumerate(token):
                    sums[channel] += value * value

        return add

    for index, block in enumerate(model.model.layers):
        for name, path in paths.items():
            block.get_submodule(path).register_forward_pre_hook(hook((index, name)))
    model(input_ids=samples, use_cache=False)
    for (index, name), sums in expected.items():
        assert found[index][name] == pytest.approx(sums, rel=1e-4)


# ----- pruning block by block ---------------------------------------------------------------------


def test_next_block_sees_pruned_output(untied: Path, computing: Computing) -> None:
    """A fully pruned block returns its input, so each block's first linears see the embeddings."""
    samples = token_sequences(3, 5)
    seen: list[Tensor] = []

    def record(weight: Tensor, square_sum: Tensor) -> Tensor:
        seen.append(square_sum.clone())
        return everything(weight, square_sum)

    stream = BlockStream(OpenedModel(untied), computing)
    first_of_each = []
    for _, masks in prune_by_block(stream, samples, record):
        first_of_each.append(seen[0])
        seen.clear()
        assert all(mask.all() for mask in masks.values())
    model = whole_model(untied)
    hidden = model.model.embed_tokens(samples).detach()
    for index, found in enumerate(first_of_each):
        normed = model.model.layers[index].input_layernorm(hidden).detach()
        torch.testing.assert_close(
            found.cpu(), normed.double().square().sum(dim=(0, 1)), rtol=1e-4, atol=1e-6
        )


def test_choices_see_the_dense_block_weights(untied: Path, computing: Computing) -> None:
    stored = OpenedModel(untied)
    expected = [
        stored.checkpoint.read(linear.parameter)
        for block in stored.plan.blocks
        for linear in block.linears
    ]
    weights: list[Tensor] = []

    def record(weight: Tensor, square_sum: Tensor) -> Tensor:
        weights.append(weight.detach().clone())
        return everything(weight, square_sum)

    list(prune_by_block(BlockStream(stored, computing), token_sequences(2, 4), record))
    assert len(weights) == len(expected)
    assert all(
        torch.equal(found.cpu(), dense) for found, dense in zip(weights, expected, strict=True)
    )


def test_blocks_come_one_at_a_time(untied: Path, computing: Computing) -> None:
    """A caller that stops after one block computes no other block."""
    calls: list[int] = []

    def record(weight: Tensor, square_sum: Tensor) -> Tensor:
        calls.append(1)
        return nothing(weight, square_sum)

    pruning = prune_by_block(
        BlockStream(OpenedModel(untied), computing), token_sequences(1, 4), record
    )
    assert next(pruning)[0] == 0
    assert len(calls) == 7


@pytest.mark.parametrize("tokens_at_once", [1, 100, 512])
def test_batched_windows_give_the_same_masks(
    computing: Computing, tokens_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the trained demo model, batches may change at most three bits of the masks.

    A matrix product may differ in its last bit with the batch size. A CUDA device selects another
    matrix product for another batch size, so there one bit in ten thousand may differ. A sequence
    that is longer than ``TOKENS_PER_BATCH`` forms a batch of its own.
    """
    model = open_model("demo")
    samples = torch.randint(0, 1000, (16, 32), generator=torch.Generator().manual_seed(0))
    choose = LocalPruning("wanda", 0.5, "row").prune_mask
    stream = BlockStream(model, computing)

    def masks(tokens: int) -> dict[int, dict[str, Tensor]]:
        monkeypatch.setattr("espalier.hf.stream.block_stream.TOKENS_PER_BATCH", tokens)
        return dict(prune_by_block(stream, samples, choose))

    one_by_one = masks(32)
    batched = masks(tokens_at_once)
    flips = sum(
        int((batched[block][name] != mask).sum())
        for block in one_by_one
        for name, mask in one_by_one[block].items()
    )
    most = 3 if computing.device.type == "cpu" else model.plan.num_weights // 10_000
    assert flips <= most * (tokens_at_once >= 64)


@pytest.mark.parametrize(("samples", "tokens"), [(32, 8), (4, 64), (8, 64)])
def test_block_memory_does_not_grow_with_windows(
    untied: Path, monkeypatch: pytest.MonkeyPatch, samples: int, tokens: int
) -> None:
    """The largest tensor of a block has 64 tokens of 48 channels.

    No squares of all inputs and no attention matrix of all token pairs are made at once.
    """
    monkeypatch.setattr("espalier.hf.stream.block_stream.TOKENS_PER_BATCH", 64)
    stream = BlockStream(OpenedModel(untied), CPU)
    activations = stream.start(token_sequences(samples, tokens))
    with torch.no_grad(), stream.block(0) as block, LargestTensor() as largest:
        sums = InputSquareSums(stream.linears(0, block))
        with sums.watching():
            activations.through(0, block)
    assert largest.numbers == 64 * 48


@pytest.mark.parametrize("threads", [1, 2])
def test_chunked_sums_are_bit_identical(threads: int) -> None:
    inputs = torch.randn(3, 400, 1300, generator=torch.Generator().manual_seed(0))
    linear = nn.Linear(1300, 1)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        sums = InputSquareSums({"a": linear})
        with sums.watching(), LargestTensor() as largest:
            linear(inputs)
        assert torch.equal(
            sums.sums["a"], inputs.flatten(0, 1).square().sum(dim=0, dtype=torch.float64)
        )
    finally:
        torch.set_num_threads(before)
    assert largest.numbers == 1200 * 512


def test_the_same_windows_give_the_same_masks(untied: Path, computing: Computing) -> None:
    def half(weight: Tensor, square_sum: Tensor) -> Tensor:
        scores = weight.abs() * square_sum.sqrt()
        return scores < scores.median()

    runs = [
        dict(
            prune_by_block(BlockStream(OpenedModel(untied), computing), token_sequences(9, 6), half)
        )
        for _ in range(2)
    ]
    for index, masks in runs[0].items():
        assert all(torch.equal(mask, runs[1][index][name]) for name, mask in masks.items())


# ----- layers of FedSpaLLM ------------------------------------------------------------------------


@torch.no_grad()
def test_pruned_layers_equal_those_of_hooks(untied: Path) -> None:
    """SparseGPT of blocks 0 and 2 against Gram matrices that hooks collect in a whole model.

    Each block of that model is replaced by its pruned version before the next block is computed.
    """
    ids = token_sequences(9, 6)
    pruning = LocalPruning("sparsegpt", 0.5, "layer")
    model = whole_model(untied)
    found = {
        layer.index: layer
        for layer in prune_layers(BlockStream(OpenedModel(untied), CPU), ids, pruning, [0, 2])
    }
    assert set(found) == {0, 2}
    for index in (0, 2):
        linears = OpenedModel(untied).family.linears
        modules = {
            name: model.model.layers[index].get_submodule(path) for name, path in linears.items()
        }
        inputs: dict[str, list[Tensor]] = {name: [] for name in modules}
        hooks = [
            m.register_forward_pre_hook(lambda _, i, s=inputs[name]: s.append(i[0][0]))
            for name, m in modules.items()
        ]
        for sample in ids:
            model(input_ids=sample[None], use_cache=False)
        for hook in hooks:
            hook.remove()
        for name, module in modules.items():
            tokens = torch.cat(inputs[name])
            mask, weight = sparsegpt.prune(
                module.weight, sparsegpt.factorise(tokens.T @ tokens), 0.5
            )
            matrix = found[index].matrices[name]
            assert (mask != matrix.prune_mask).float().mean() < 0.01
            agree = mask == matrix.prune_mask
            torch.testing.assert_close(matrix.weight()[agree], weight[agree], rtol=1e-2, atol=1e-3)
            module.weight.copy_(matrix.weight())


@pytest.mark.parametrize(("damping_mean", "counted"), [("live", None), ("all", 2.5)])
def test_dead_channel_count_follows_from_windows(
    untied: Path, monkeypatch: pytest.MonkeyPatch, damping_mean: Any, counted: float | None
) -> None:
    """A dead channel counts as half the number of calibration samples, however they are batched."""
    given = []

    def factorise(gram: Tensor, *, dead_diagonal: float | None) -> sparsegpt.Factor:
        given.append(dead_diagonal)
        return sparsegpt.factorise(gram, dead_diagonal=dead_diagonal)

    monkeypatch.setattr("espalier.hf.stream.input_statistics.factorise", factorise)
    pruning = LocalPruning("sparsegpt", 0.5, "layer", damping_mean=damping_mean)
    list(prune_layers(BlockStream(OpenedModel(untied), CPU), token_sequences(5, 4), pruning, [0]))
    assert given
    assert set(given) == {counted}


def test_walk_ends_after_last_sampled_layer(untied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = BlockStream(OpenedModel(untied), CPU)
    walked = []
    block = stream.block
    monkeypatch.setattr(
        stream, "block", lambda index, *given: (walked.append(index), block(index, *given))[1]
    )
    list(prune_layers(stream, token_sequences(2, 4), LocalPruning("wanda", 0.5, "row"), [1]))
    assert walked == [0, 1]
