"""Running a model block by block gives the same results as running it whole."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from espalier.errors import EspalierError
from espalier.hf.machine.computing import Computing
from espalier.hf.opening.opened_model import OpenedModel
from espalier.hf.stream import edits
from espalier.hf.stream.block_stream import BlockStream, apply_prune_masks, run_through
from tests.devices import assert_close
from tests.hf.tiny_models import (
    llama_config,
    random_masks,
    save_model,
    token_sequences,
    whole_model,
)

LINEARS = {
    "attn.q": "self_attn.q_proj", "attn.k": "self_attn.k_proj", "attn.v": "self_attn.v_proj",
    "attn.o": "self_attn.o_proj", "mlp.gate": "mlp.gate_proj", "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}  # fmt: skip


SAMPLES_PER_BATCH = 8


@pytest.fixture
def eight_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the batch size of a block to 8 sequences of 7 tokens."""
    monkeypatch.setattr("espalier.hf.stream.block_stream.TOKENS_PER_BATCH", 8 * 7)


@pytest.fixture
def stream(untied: Path, computing: Computing) -> BlockStream:
    return BlockStream(OpenedModel(untied), computing)


def logits(stream: BlockStream, samples: Tensor) -> Tensor:
    return torch.cat(list(stream.logits(run_through(stream, samples)))).view(*samples.shape, -1)


@torch.no_grad()
def whole_logits(
    directory: Path, samples: Tensor, device: torch.device, dtype: torch.dtype = torch.float32
) -> Tensor:
    return (
        whole_model(directory, dtype)
        .to(device)(input_ids=samples.to(device), use_cache=False)
        .logits
    )


@pytest.mark.parametrize(
    "samples", [1, SAMPLES_PER_BATCH, SAMPLES_PER_BATCH + 1, 2 * SAMPLES_PER_BATCH]
)
@pytest.mark.usefixtures("eight_samples")
def test_logits_are_the_same_for_any_batches(
    stream: BlockStream, untied: Path, samples: int
) -> None:
    ids = token_sequences(samples, 7)
    assert_close(logits(stream, ids), whole_logits(untied, ids, stream.computing.device))


def test_windows_of_longest_and_shortest_length(stream: BlockStream, untied: Path) -> None:
    for ids in (token_sequences(2, 64), token_sequences(3, 1)):
        assert_close(logits(stream, ids), whole_logits(untied, ids, stream.computing.device))


def test_second_use_gives_the_same_bits(stream: BlockStream) -> None:
    ids = token_sequences(3, 6)
    others = token_sequences(2, 9, seed=6)
    first = logits(stream, ids)
    logits(stream, others)
    assert torch.equal(logits(stream, ids), first)


@pytest.mark.usefixtures("eight_samples")
def test_unread_logits_leave_nothing_behind(stream: BlockStream) -> None:
    ids = token_sequences(SAMPLES_PER_BATCH + 1, 7)
    first = logits(stream, ids)
    unfinished = stream.logits(run_through(stream, ids))
    next(unfinished)
    unfinished.close()
    assert torch.equal(logits(stream, ids), first)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_lower_precision_equals_whole_model(
    untied: Path, device: torch.device, dtype: torch.dtype
) -> None:
    stream = BlockStream(OpenedModel(untied), Computing(device, dtype, 1))
    ids = token_sequences(3, 8)
    found = logits(stream, ids)
    assert found.dtype == dtype
    assert_close(
        found.float(), whole_logits(untied, ids, device, dtype).float(), cpu=2e-2, cuda=2e-2
    )


def test_bf16_model_is_computed_in_float32(tmp_path: Path, computing: Computing) -> None:
    directory = save_model(tmp_path / "bf16", llama_config(), dtype=torch.bfloat16)
    ids = token_sequences(2, 8)
    found = logits(BlockStream(OpenedModel(directory), computing), ids)
    assert_close(found, whole_logits(directory, ids, computing.device))


def test_only_the_block_in_hand_is_in_memory(stream: BlockStream) -> None:
    with stream.block(1) as block:
        assert {parameter.device.type for parameter in block.parameters()} == {
            stream.computing.device.type
        }
        with stream.block(2):
            pass
    assert {parameter.device.type for parameter in block.parameters()} == {"meta"}


def test_a_block_is_loaded_afresh_each_time(stream: BlockStream, untied: Path) -> None:
    stored = load_file(untied / "model.safetensors")
    with stream.block(1) as block:
        block.self_attn.q_proj.weight.detach().zero_()
    with stream.block(1) as block:
        for name, value in block.state_dict().items():
            assert torch.equal(value.cpu(), stored[f"model.layers.1.{name}"])


def test_a_block_is_let_go_when_its_user_fails(stream: BlockStream) -> None:
    with pytest.raises(RuntimeError), stream.block(0) as block:
        raise RuntimeError
    assert {parameter.device.type for parameter in block.parameters()} == {"meta"}


def test_linears_by_canonical_name(stream: BlockStream) -> None:
    with stream.block(0) as block:
        assert stream.linears(0, block) == {
            name: block.get_submodule(path) for name, path in LINEARS.items()
        }


def test_masked_logits_equal_those_with_zeros(stream: BlockStream, untied: Path) -> None:
    shapes = {linear.name: linear.shape for linear in stream.model.plan.blocks[0].linears}
    masked = whole_model(untied)
    with torch.no_grad():
        for index, block in enumerate(masked.model.layers):
            for name, mask in random_masks(shapes, index).items():
                block.get_submodule(LINEARS[name]).weight[mask] = 0
    ids = token_sequences(3, 8)
    found = torch.cat(
        list(
            stream.logits(
                run_through(stream, ids, edits.masked(lambda index: random_masks(shapes, index)))
            )
        )
    )
    found = found.view(3, 8, -1)
    with torch.no_grad():
        assert_close(found, masked(input_ids=ids, use_cache=False).logits)


def test_the_dense_model_has_no_edits() -> None:
    assert edits.dense(3) == {}


def test_masks_zero_only_their_weights() -> None:
    linear = nn.Linear(3, 2)
    before = linear.weight.detach().clone()
    apply_prune_masks(
        {"a": linear, "b": nn.Linear(1, 1)},
        {"a": torch.tensor([[True, False, False], [False, True, True]])},
    )
    zero = [(0, 0), (1, 1), (1, 2)]
    for row in range(2):
        for column in range(3):
            assert linear.weight[row, column].item() == (
                0 if (row, column) in zero else before[row, column].item()
            )


def test_the_global_generator_is_left_alone(untied: Path, computing: Computing) -> None:
    before = torch.random.get_rng_state()
    logits(BlockStream(OpenedModel(untied), computing), token_sequences(1, 4))
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize(
    "name", ["model.norm.weight", "model.layers.1.input_layernorm.weight", "lm_head.weight"]
)
def test_missing_tensor_outside_linears_is_named(
    untied: Path, computing: Computing, tmp_path: Path, name: str
) -> None:
    damaged = Path(shutil.copytree(untied, tmp_path / "damaged"))
    tensors = load_file(damaged / "model.safetensors")
    del tensors[name]
    save_file(tensors, damaged / "model.safetensors", {"format": "pt"})
    with pytest.raises(EspalierError, match=name):
        run_through(BlockStream(OpenedModel(damaged), computing), token_sequences(1, 4))


def test_configuration_of_other_width_is_refused(
    untied: Path, computing: Computing, tmp_path: Path
) -> None:
    damaged = Path(shutil.copytree(untied, tmp_path / "damaged"))
    text = (damaged / "config.json").read_text()
    (damaged / "config.json").write_text(
        text.replace('"intermediate_size": 48', '"intermediate_size": 40')
    )
    with pytest.raises(EspalierError, match="damaged"):
        run_through(BlockStream(OpenedModel(damaged), computing), token_sequences(1, 4))
