"""Whole models for tuning: frozen, as transformers loads them; in NF4 with dequantised weights."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, PretrainedConfig

from espalier.errors import EspalierError
from espalier.hf.files import checkpoint
from espalier.hf.machine.computing import Computing
from espalier.hf.nf4 import cache
from espalier.hf.nf4.matrices import bitsandbytes
from espalier.hf.opening.opened_model import OpenedModel
from espalier.hf.whole.model import Base, head_parameters, load_whole
from tests.hf.tiny_encoders import ENCODERS, save_encoder
from tests.hf.tiny_models import (
    OWN_KEYS,
    llama_config,
    save_model,
    tiny_config,
    token_sequences,
    whole_model,
)

WIDE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128}
"""Sizes that NF4 can represent."""
DTYPES: list[tuple[Base, torch.dtype]] = [("float32", torch.float32), ("bfloat16", torch.bfloat16)]
DECODERS: dict[str, Callable[..., PretrainedConfig]] = {
    **{kind: partial(tiny_config, kind) for kind in OWN_KEYS},
    "llama with biases": partial(llama_config, attention_bias=True, mlp_bias=True),
    "opt": partial(tiny_config, "opt", word_embed_proj_dim=24),
}


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(
        tmp_path_factory.mktemp("wide"),
        llama_config(**WIDE, num_hidden_layers=2, attention_bias=True),
    )


def bits(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# ----- float32 and bfloat16 -----------------------------------------------------------------------


@pytest.mark.parametrize(("base", "dtype"), DTYPES)
@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("family", DECODERS)
@torch.no_grad()
def test_decoder_equals_that_of_transformers(
    family: str, tie: bool, base: Base, dtype: torch.dtype, tmp_path: Path
) -> None:
    directory = save_model(
        tmp_path, DECODERS[family](tie_word_embeddings=tie), max_shard_size="20KB"
    )
    found = load_whole(
        OpenedModel(directory), Computing(torch.device("cpu"), torch.float32, 1), base
    )
    expected = whole_model(directory, dtype)
    assert type(found) is type(expected)
    assert same(bits(found), bits(expected))
    buffers, wanted = (
        {
            name: (value.dtype, value.shape)
            for name, value in own.named_buffers()
            # Gemma casts it to the dtype of the embedding whenever it uses it.
            if not name.endswith("embed_scale")
        }
        for own in (found, expected)
    )
    assert buffers == wanted
    samples = token_sequences(3, 9)
    assert torch.equal(found(input_ids=samples).logits, expected(input_ids=samples).logits)
    tied = found.get_output_embeddings().weight is found.get_input_embeddings().weight
    assert tied == tie
    assert not any(parameter.requires_grad for parameter in found.parameters())
    assert not found.training


@pytest.mark.parametrize("stored_as", [torch.bfloat16, torch.float16, torch.float32])
def test_files_of_another_dtype_are_converted(
    stored_as: torch.dtype, tmp_path: Path, computing: Computing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Conversion reads pieces and no whole tensor, so memory exceeds the model by one piece."""
    directory = save_model(tmp_path, llama_config(), dtype=stored_as)
    expected = {
        name: value.to(torch.bfloat16)
        for name, value in load_file(directory / "model.safetensors").items()
    }
    monkeypatch.setattr(checkpoint, "CHUNK", 1024)
    monkeypatch.setattr(checkpoint.Checkpoint, "read", None)
    found = load_whole(OpenedModel(directory), computing, "bfloat16")
    assert same(bits(found), expected)
    assert {value.device.type for value in [*found.parameters(), *found.buffers()]} == {
        computing.device.type
    }


def test_missing_tensor_is_named_before_reading(tmp_path: Path, computing: Computing) -> None:
    directory = save_model(tmp_path / "saved", llama_config())
    tensors = load_file(directory / "model.safetensors")
    norm = tensors.pop("model.norm.weight")
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        EspalierError,
        match=r"saved: tensor model.norm.weight is missing: its files contain 29 tensors",
    ):
        load_whole(OpenedModel(directory), computing, "float32")
    save_file(
        tensors | {"model.norm.weight": norm[:5].clone()},
        directory / "model.safetensors",
        {"format": "pt"},
    )
    with pytest.raises(
        EspalierError,
        match=r"model.norm.weight has shape \[5\] in model.safetensors, but \[32\] according",
    ):
        load_whole(OpenedModel(directory), computing, "float32")


# ----- encoders and their heads -------------------------------------------------------------------

HEAD_PATHS = {
    "bert": {"head.dense": "bert.pooler.dense", "head.out": "classifier"},
    "roberta": {"head.dense": "classifier.dense", "head.out": "classifier.out_proj"},
    "xlm-roberta": {"head.dense": "classifier.dense", "head.out": "classifier.out_proj"},
}
STORED_AS = ["AutoModelForMaskedLM", "AutoModel", "AutoModelForSequenceClassification"]


@torch.no_grad()
def classifier(directory: Path, found: Any, model_type: str) -> Any:
    """Return the model that transformers loads, with the head of the model that was found."""
    expected = AutoModelForSequenceClassification.from_pretrained(
        directory, num_labels=3, ignore_mismatched_sizes=True
    )
    for path in HEAD_PATHS[model_type].values():
        expected.get_submodule(path).load_state_dict(found.get_submodule(path).state_dict())
    return expected.eval()


@pytest.mark.parametrize("stored_as", STORED_AS)
@pytest.mark.parametrize("model_type", ENCODERS)
@torch.no_grad()
def test_encoder_equals_transformers_below_head(
    model_type: str, stored_as: str, tmp_path: Path, computing: Computing
) -> None:
    directory = save_encoder(tmp_path, model_type, stored_as)
    model = OpenedModel(directory)
    found = load_whole(model, computing, "float32", num_labels=3, seed=7)
    expected = classifier(directory, found, model_type)
    assert same(bits(found), bits(expected))
    samples = token_sequences(3, 9) % 90 + 2
    logits = found(input_ids=samples.to(computing.device)).logits
    assert logits.shape == (3, 3)
    torch.testing.assert_close(
        logits.cpu(), expected(input_ids=samples).logits, rtol=1e-5, atol=1e-5
    )
    trained = {name for name, parameter in found.named_parameters() if parameter.requires_grad}
    assert trained == {
        f"{path}.{kind}" for path in HEAD_PATHS[model_type].values() for kind in ("weight", "bias")
    }
    assert found.config.num_labels == 3


@pytest.mark.parametrize("model_type", ENCODERS)
def test_the_head_by_canonical_name(model_type: str, tmp_path: Path, computing: Computing) -> None:
    model = OpenedModel(save_encoder(tmp_path, model_type))
    found = load_whole(model, computing, "bfloat16", num_labels=5, seed=7)
    head = head_parameters(model.family, found)
    assert {name: tuple(value.shape) for name, value in head.items()} == {
        "head.dense.weight": (32, 32),
        "head.dense.bias": (32,),
        "head.out.weight": (5, 32),
        "head.out.bias": (5,),
    }
    for name, path in HEAD_PATHS[model_type].items():
        assert head[f"{name}.weight"] is found.get_submodule(path).weight
    assert {value.dtype for value in head.values()} == {torch.float32}
    base = {value.dtype for value in found.parameters() if not value.requires_grad}
    assert base == {torch.bfloat16}


def test_head_depends_on_its_seed_alone(tmp_path: Path, computing: Computing) -> None:
    model = OpenedModel(save_encoder(tmp_path, "roberta"))
    heads = []
    for state, seed in ((1, 7), (2, 7), (2, 8)):
        torch.manual_seed(state)
        before = torch.get_rng_state()
        heads.append(bits(load_whole(model, computing, "float32", num_labels=3, seed=seed)))
        assert torch.equal(torch.get_rng_state(), before)
    assert same(heads[0], heads[1])
    different = {name for name in heads[0] if not torch.equal(heads[0][name], heads[2][name])}
    assert different == {"classifier.dense.weight", "classifier.out_proj.weight"}
    weight = heads[0]["classifier.dense.weight"]
    # The weights are drawn with ``initializer_range`` 0.2.
    assert 0.17 < weight.std().item() < 0.23
    assert not heads[0]["classifier.out_proj.bias"].any()


def test_stored_dense_layer_starts_head(tmp_path: Path, computing: Computing) -> None:
    """BERT's pooler is loaded; the classifier of an earlier task is not, even of equal size."""
    model = OpenedModel(
        save_encoder(tmp_path, "bert", "AutoModelForSequenceClassification", num_labels=3)
    )
    found = bits(load_whole(model, computing, "float32", num_labels=3))
    stored = load_file(tmp_path / "model.safetensors")
    assert torch.equal(found["bert.pooler.dense.weight"], stored["bert.pooler.dense.weight"])
    assert torch.equal(found["bert.pooler.dense.bias"], stored["bert.pooler.dense.bias"])
    assert not torch.equal(found["classifier.weight"], stored["classifier.weight"])


@pytest.mark.parametrize("model_type", ["bert", "roberta"])
@pytest.mark.parametrize("base", ["bfloat16", "nf4"])
def test_the_head_learns_in_float32_on_any_base(
    model_type: str, base: Base, tmp_path: Path, device: torch.device
) -> None:
    model = OpenedModel(save_encoder(tmp_path, model_type, **WIDE))
    found = load_whole(model, Computing(device, torch.bfloat16, 1), base, num_labels=3)
    labels = torch.tensor([0, 1, 2], device=device)
    loss = found(input_ids=(token_sequences(3, 9) % 90 + 2).to(device), labels=labels).loss
    assert loss.dtype == torch.float32
    loss.backward()
    for name, parameter in head_parameters(model.family, found).items():
        assert parameter.grad is not None, name
        assert parameter.grad.any(), name


# ----- NF4 ----------------------------------------------------------------------------------------


def dequantised(linear: Any) -> Tensor:
    return bitsandbytes().functional.dequantize_4bit(linear.weight.data, linear.weight.quant_state)


def quantised_paths(model: nn.Module) -> list[str]:
    return [
        path
        for path, module in model.named_modules()
        if isinstance(module, bitsandbytes().nn.Linear4bit)
    ]


@torch.no_grad()
def without_quantisation(directory: Path, found: nn.Module, dtype: torch.dtype) -> Any:
    """Return the dense model with the dequantised weights in place of its own."""
    expected = whole_model(directory, dtype)
    for path in quantised_paths(found):
        expected.get_submodule(path).weight.copy_(dequantised(found.get_submodule(path)))
    return expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_only_the_linears_of_blocks_are_quantised(
    wide: Path, dtype: torch.dtype, device: torch.device
) -> None:
    model = OpenedModel(wide)
    found = load_whole(model, Computing(device, dtype, 1), "nf4")
    assert {f"{path}.weight" for path in quantised_paths(found)} == {
        linear.parameter for block in model.plan.blocks for linear in block.linears
    }
    others = {name: value for name, value in found.named_parameters() if value.dtype != torch.uint8}
    stored = load_file(wide / "model.safetensors")
    assert set(others) == set(stored) - {f"{path}.weight" for path in quantised_paths(found)}
    assert all(torch.equal(value.cpu(), stored[name].to(dtype)) for name, value in others.items())
    assert not any(parameter.requires_grad for parameter in found.parameters())
    assert {value.device.type for value in [*found.parameters(), *found.buffers()]} == {device.type}
    assert not any(module.training for module in found.modules())
    samples = token_sequences(3, 9)
    logits = found(input_ids=samples.to(device)).logits.float().cpu()
    expected = without_quantisation(wide, found, dtype)(input_ids=samples).logits.float()
    tolerance = 1e-4 if dtype == torch.float32 else 0.1
    torch.testing.assert_close(logits, expected, rtol=tolerance, atol=tolerance)


@torch.no_grad()
def test_evaluation_leaves_weights_alone(wide: Path, device: torch.device) -> None:
    found = load_whole(OpenedModel(wide), Computing(device, torch.bfloat16, 1), "nf4")
    before = [dequantised(found.get_submodule(path)) for path in quantised_paths(found)]
    found(input_ids=token_sequences(3, 9).to(device))
    after = [dequantised(found.get_submodule(path)) for path in quantised_paths(found)]
    assert len(before) == 14
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


def test_cached_model_equals_quantised_one(
    wide: Path, tmp_path: Path, computing: Computing, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = load_whole(OpenedModel(wide), computing, "nf4", cache_folder=tmp_path)
    monkeypatch.setattr(cache, "quantise", None)
    second = load_whole(OpenedModel(wide), computing, "nf4", cache_folder=tmp_path)
    assert any(name.endswith("nested_absmax") for name in bits(first))
    assert same(bits(first), bits(second))


def test_tied_embeddings_stay_tied_unquantised(tmp_path: Path, computing: Computing) -> None:
    directory = save_model(tmp_path, llama_config(**WIDE, tie_word_embeddings=True))
    found = load_whole(OpenedModel(directory), computing, "nf4")
    assert found.lm_head.weight is found.model.embed_tokens.weight
    assert found.lm_head.weight.dtype == torch.float32


def test_peft_adapts_it_and_only_adapters_learn(wide: Path, device: torch.device) -> None:
    from peft import LoraConfig, get_peft_model
    from peft.tuners.lora.bnb import Linear4bit

    found = load_whole(OpenedModel(wide), Computing(device, torch.float32, 1), "nf4")
    adapted = get_peft_model(found, LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))
    samples = token_sequences(3, 9).to(device)
    adapted(input_ids=samples, labels=samples).loss.backward()
    assert sum(isinstance(module, Linear4bit) for module in adapted.modules()) == 4
    learning = {
        name for name, parameter in adapted.named_parameters() if parameter.grad is not None
    }
    assert len(learning) == 2 * 2 * 2
    assert all("lora_" in name for name in learning)


def test_unquantisable_matrix_is_named(untied: Path, computing: Computing) -> None:
    with pytest.raises(
        EspalierError,
        match=(
            r"training.base = 'nf4': .*q_proj.weight has 32 input features, .* set training.base to"
            r" 'bfloat16'"
        ),
    ):
        load_whole(OpenedModel(untied), computing, "nf4")
