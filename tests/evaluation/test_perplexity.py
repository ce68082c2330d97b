"""Losses against those of transformers, sample by sample."""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from espalier.evaluation.perplexity import mean_losses, perplexity
from espalier.hf.machine.computing import Computing
from espalier.hf.opening.opened_model import OpenedModel
from espalier.hf.stream.block_stream import BlockStream
from espalier.hf.stream.edits import masked

VOCABULARY = 64


def save_model(path: Path, *, blank_head: bool = False) -> Path:
    """Save a tiny random LLaMA without a tokenizer; the texts are token ids already."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        initializer_range=0.3,
    )
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        if blank_head:
            model.lm_head.weight.zero_()
        model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def stream(directory: Path, device: torch.device) -> BlockStream:
    return BlockStream(OpenedModel(directory), Computing(device, torch.float32, 1))


def samples(number: int, tokens: int, seed: int) -> Tensor:
    return torch.randint(
        VOCABULARY, (number, tokens), generator=torch.Generator().manual_seed(seed)
    )


@torch.no_grad()
def loss_by_transformers(directory: Path, text: Tensor, prune: str = "") -> float:
    """Return the mean loss that the whole model reports, over all samples.

    ``prune`` names a matrix to set to zero.
    """
    model = AutoModelForCausalLM.from_pretrained(
        directory, local_files_only=True, dtype=torch.float32
    ).eval()
    if prune:
        model.get_parameter(prune).zero_()
    losses = [model(input_ids=sample[None], labels=sample[None]).loss.item() for sample in text]
    return sum(losses) / len(losses)


@pytest.mark.parametrize("number", [1, 3, 8, 11])
def test_the_loss_is_that_of_transformers(
    stream: BlockStream, directory: Path, number: int
) -> None:
    text = samples(number, 12, 1)
    assert mean_losses(stream, {"a": text}) == {
        "a": pytest.approx(loss_by_transformers(directory, text), rel=1e-5)
    }


def test_texts_keep_own_losses_across_batches(stream: BlockStream, directory: Path) -> None:
    """Five and seven samples: the second batch of eight holds only the end of the second text."""
    texts = {"b": samples(5, 10, 1), "a": samples(7, 10, 2)}
    found = mean_losses(stream, texts)
    assert list(found) == ["b", "a"]
    for name, text in texts.items():
        assert found[name] == pytest.approx(loss_by_transformers(directory, text), rel=1e-5)


def test_masked_loss_equals_that_with_zeros(stream: BlockStream, directory: Path) -> None:
    text = samples(3, 12, 1)
    found = mean_losses(
        stream,
        {"a": text},
        masked(lambda index: {"mlp.up": torch.ones(40, 32, dtype=torch.bool)} if index else {}),
    )
    expected = loss_by_transformers(directory, text, "model.layers.1.mlp.up_proj.weight")
    assert found["a"] == pytest.approx(expected, rel=1e-5)
    assert found["a"] != pytest.approx(mean_losses(stream, {"a": text})["a"], rel=1e-3)


def test_uniform_model_has_loss_of_guessing(tmp_path: Path, device: torch.device) -> None:
    """A head of zeros gives each of 64 words the same probability."""
    stream = BlockStream(
        OpenedModel(save_model(tmp_path, blank_head=True)), Computing(device, torch.float32, 1)
    )
    loss = mean_losses(stream, {"a": samples(2, 9, 1)})["a"]
    assert loss == pytest.approx(math.log(64), rel=1e-6)
    assert perplexity(loss) == pytest.approx(64, rel=1e-5)


def test_window_of_two_tokens_has_one_prediction(stream: BlockStream, directory: Path) -> None:
    text = samples(2, 2, 4)
    assert mean_losses(stream, {"a": text})["a"] == pytest.approx(
        loss_by_transformers(directory, text), rel=1e-5
    )


@pytest.mark.parametrize(
    ("loss", "expected"), [(0.0, 1.0), (1.0, math.e), (math.log(20), 20.0), (800.0, math.inf)]
)
def test_perplexity_is_the_exponential(loss: float, expected: float) -> None:
    assert perplexity(loss) == pytest.approx(expected)


def test_a_loss_that_is_not_a_number_stays_one() -> None:
    assert math.isnan(perplexity(math.nan))
