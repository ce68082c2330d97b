"""Logits computed in pieces equal those of the whole model; no tensor is larger than a piece."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import OPTConfig

from espalier.evaluation.perplexity import mean_losses
from espalier.hf.machine.computing import Computing
from espalier.hf.opening.opened_model import OpenedModel
from espalier.hf.stream.block_stream import BlockStream, logits_at, run_through, tokens_at_once
from tests.devices import assert_close
from tests.hf.tiny_models import (
    VOCABULARY,
    llama_config,
    save_model,
    tiny_config,
    token_sequences,
    whole_model,
)
from tests.largest_tensor import LargestTensor

CPU = Computing(torch.device("cpu"), torch.float32, 1)


@pytest.fixture(scope="module", params=["untied", "tied", "opt", "granite", "gemma2"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models with an untied head, a tied head, embeddings of another width, or changed logits."""
    if request.param in ("granite", "gemma2"):
        return save_model(tmp_path_factory.mktemp(request.param), tiny_config(request.param))
    if request.param == "opt":
        config = OPTConfig(
            vocab_size=VOCABULARY, hidden_size=32, ffn_dim=48, num_hidden_layers=2,
            num_attention_heads=4, max_position_embeddings=16, word_embed_proj_dim=16,
            do_layer_norm_before=False,
        )  # fmt: skip
        return save_model(tmp_path_factory.mktemp("opt"), config)
    return save_model(
        tmp_path_factory.mktemp("llama"), llama_config(tie_word_embeddings=request.param == "tied")
    )


@pytest.fixture
def five_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("espalier.hf.stream.block_stream.LOGITS_AT_ONCE", 5 * VOCABULARY + 1)


@pytest.mark.parametrize(
    ("vocabulary", "tokens"), [(1, 1 << 24), (32000, 524), (1 << 24, 1), (1 << 25, 1)]
)
def test_piece_has_at_least_one_token(vocabulary: int, tokens: int) -> None:
    assert tokens_at_once(vocabulary) == tokens


@torch.no_grad()
@pytest.mark.usefixtures("five_tokens")
def test_stream_gives_logits_in_pieces(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of 3 and 1 sequences of 7 tokens: pieces of 5, 5, 5, 5 and 1, then 5 and 2 tokens."""
    monkeypatch.setattr("espalier.hf.stream.block_stream.TOKENS_PER_BATCH", 21)
    samples = token_sequences(4, 7)
    stream = BlockStream(OpenedModel(directory), CPU)
    pieces = list(stream.logits(run_through(stream, samples)))
    assert [len(piece) for piece in pieces] == [5, 5, 5, 5, 1, 5, 2]
    expected = whole_model(directory)(input_ids=samples, use_cache=False).logits
    assert_close(torch.cat(pieces), expected.flatten(0, 1))


@torch.no_grad()
@pytest.mark.usefixtures("five_tokens")
def test_whole_model_gives_logits_in_pieces(directory: Path) -> None:
    model = whole_model(directory)
    seen = list[int]()
    samples = token_sequences(3, 9)
    padding = torch.ones(3, 9, dtype=torch.int64)
    padding[1, 6:] = 0
    places = (torch.rand(3, 9, generator=torch.Generator().manual_seed(0)) < 0.5) & (padding == 1)
    expected = model(input_ids=samples, attention_mask=padding).logits[places]

    def count(_: nn.Module, inputs: tuple[Tensor, ...], logits: Tensor) -> None:
        seen.append(logits.numel() // VOCABULARY)

    model.get_output_embeddings().register_forward_hook(count)
    pieces = list(logits_at(model, samples, padding, places))
    assert_close(torch.cat(pieces), expected)
    assert seen == [0, *(len(piece) for piece in pieces)]
    assert max(seen) == 5
    assert not model.get_output_embeddings()._forward_pre_hooks


@pytest.mark.usefixtures("five_tokens")
def test_a_model_that_fails_keeps_no_hook(directory: Path) -> None:
    model = whole_model(directory)
    with pytest.raises(IndexError):
        list(
            logits_at(
                model, torch.full((1, 2), VOCABULARY), None, torch.ones(1, 2, dtype=torch.bool)
            )
        )
    assert not model.get_output_embeddings()._forward_pre_hooks


@torch.no_grad()
def test_only_tied_embeddings_are_read_again(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = OpenedModel(directory)
    read = list[str]()
    stream = BlockStream(model, CPU)
    original = model.checkpoint.read
    activations = run_through(stream, token_sequences(1, 4))
    monkeypatch.setattr(model.checkpoint, "read", lambda name: read.append(name) or original(name))
    list(stream.logits(activations))
    tied = "lm_head.weight" not in model.checkpoint.tensors
    assert (f"{model.family.embeddings}.weight" in read) == tied
    assert ("lm_head.weight" in read) != tied


@pytest.mark.parametrize(("samples", "tokens"), [(40, 4), (10, 16), (5, 32)])
def test_tensors_do_not_grow_with_windows(
    untied: Path, monkeypatch: pytest.MonkeyPatch, samples: int, tokens: int
) -> None:
    """160 tokens, of which 32 pass a block together, with at most 48 channels within the block.

    The logits are computed for 8 tokens at a time; those of all 160 tokens would have 15360
    elements. The largest tensors read are the head and the embeddings, with 3072 elements each.
    """
    monkeypatch.setattr("espalier.hf.stream.block_stream.TOKENS_PER_BATCH", 32)
    monkeypatch.setattr("espalier.hf.stream.block_stream.LOGITS_AT_ONCE", 8 * VOCABULARY)
    stream = BlockStream(OpenedModel(untied), CPU)
    with LargestTensor() as largest:
        mean_losses(stream, {"a": token_sequences(samples, tokens)})
    assert largest.numbers <= 3072


def test_a_larger_budget_makes_larger_tensors(untied: Path) -> None:
    """Shows that the counter of the test above notices large tensors."""
    with LargestTensor() as largest:
        mean_losses(BlockStream(OpenedModel(untied), CPU), {"a": token_sequences(10, 16)})
    assert largest.numbers >= 64 * VOCABULARY
