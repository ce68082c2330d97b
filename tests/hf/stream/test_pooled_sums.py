"""Sums of squared inputs: errors, and masks of several parties in the dense and pruned model."""

from pathlib import Path
from typing import Any

import pytest
import torch

from espalier.errors import EspalierError
from espalier.hf.machine.computing import Computing
from espalier.hf.opening.opened_model import OpenedModel
from espalier.hf.stream.block_stream import BlockStream
from espalier.hf.stream.pooled_sums import (
    dense_sums,
    distinct,
    pack_sums,
    pooled_masks,
    unpack_sums,
)
from espalier.messages.tensor_blobs import tensor_specs
from espalier.methods.pruning.pooled_pruning import PooledPruningSettings, shared_inputs, sum_specs
from tests.hf.stream.plain_sums import plain_masks
from tests.tiny_model import save_tiny_llama

PARTIES = [torch.arange(rows * 16).view(rows, 16) for rows in (2, 5, 1)]


@pytest.fixture
def model(tmp_path: Path) -> OpenedModel:
    return OpenedModel(save_tiny_llama(tmp_path / "model"))


@pytest.fixture
def stream(model: OpenedModel) -> BlockStream:
    return BlockStream(model, Computing(torch.device("cpu"), torch.float32, 1))


def job(**changes: Any) -> PooledPruningSettings:
    return PooledPruningSettings.model_validate(changes)


@pytest.mark.parametrize("strategy", ["one-shot", "iterative"])
@pytest.mark.parametrize("weighting", ["tokens", "equal"])
def test_centralized_masks_equal_plain_ones(
    stream: BlockStream, strategy: str, weighting: str
) -> None:
    found = pooled_masks(stream, PARTIES, job(strategy=strategy, weighting=weighting))
    sequential = strategy == "iterative"
    directory = stream.model.directory
    expected = plain_masks(
        directory, PARTIES, "wanda", "row", 0.5, weighting, sequential=sequential
    )
    for block, masks in zip(stream.model.plan.blocks, found, strict=True):
        for name, mask in masks.items():
            assert torch.equal(mask, expected[block.linear(name).parameter])


def test_blob_has_the_specs_of_the_contract(stream: BlockStream) -> None:
    settings = job()
    for block, sums in zip(stream.model.plan.blocks, dense_sums(stream, PARTIES[0]), strict=True):
        blob = pack_sums(stream, block.index, sums, 32, settings)
        assert tensor_specs(blob) == sum_specs(block)
        for name, values in unpack_sums(block, blob, settings).items():
            torch.testing.assert_close(values, sums[name], rtol=0, atol=2.0**-57)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (float("nan"), "block 0 meets NaN or infinite numbers"),
        (float("inf"), "block 0 meets NaN or infinite numbers"),
        (2.0**39, "are too large to be summed: .*; use fewer samples"),
    ],
)
def test_numbers_that_cannot_be_summed(stream: BlockStream, wrong: float, words: str) -> None:
    sums = next(dense_sums(stream, PARTIES[0]))
    sums["attn.o"][3] = wrong
    with pytest.raises(EspalierError, match=words):
        pack_sums(stream, 0, sums, 32, job())


def test_inputs_that_differ_are_no_shared_input(model: OpenedModel) -> None:
    block = model.plan.blocks[0]
    sums = {linear.name: torch.ones(linear.shape[1]).double() for linear in block.linears}
    assert set(distinct(block, sums)) == set(shared_inputs(block).values())
    sums["attn.v"][0] = 2
    with pytest.raises(RuntimeError, match=r"block 0: attn\.v has another input than attn\.q"):
        distinct(block, sums)
    # NaN differs from itself, and is reported by ``pack_sums``.
    nan = {name: values * torch.nan for name, values in sums.items()}
    assert distinct(block, nan)["mlp.down"].isnan().all()
