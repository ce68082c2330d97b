"""Costs of tuning, estimated without weights: against formulas, and against tiny tuned models."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from run_names import BY_HAND
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from espalier.errors import EspalierError
from espalier.hf.machine.computing import Computing
from espalier.hf.opening.opened import OpenedModel
from espalier.hf.whole.adapters import lora_config, put_in, values
from espalier.hf.whole.model import Base, head_parameters, load_whole
from espalier.messages.blobs.adapters import pack_adapters
from espalier.messages.message import SCHEMA_VERSION, Header, Letter, num_bytes, write
from espalier.messages.payload import tensor_specs
from espalier.methods.fedpetuning.contract import TuningReport
from espalier.settings.federation import Payload
from espalier.settings.lora import LoraSettings
from espalier.training.costs.account import Account, account
from espalier.training.costs.shapes import SHAPES

FEDSODA = "attn.k,attn.v,attn.q,mlp.up,mlp.down"
"""The five matrices with which the paper's tables can be reproduced."""
LAST_THREE = {"llama3-8b": "29-31", "mistral-7b": "29-31", "qwen2-7b": "25-27"}
TINY: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 2, "tie_word_embeddings": False},
    "qwen2": {"num_key_value_heads": 1, "tie_word_embeddings": True},
    "roberta": {"type_vocab_size": 1, "pad_token_id": 1},
}
SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 40,
}
LORA = LoraSettings(rank=3, targets="attn.q,attn.v,mlp.up")


def save_tiny(directory: Path, model_type: str) -> Path:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        config = AutoConfig.for_model(model_type, **SIZES | TINY[model_type])
        made = (
            AutoModelForSequenceClassification if model_type == "roberta" else AutoModelForCausalLM
        )
        made.from_config(config).save_pretrained(directory)
    return directory


def tensor_bytes(found: Account, payload: Payload) -> int:
    """Return the bytes of the tensors, from the headers of packed blobs."""
    total = 0
    for block in found.adapters.shapes().values():
        blob, _ = pack_adapters(
            {name: torch.zeros(shape) for name, shape in block.items()}, payload
        )
        total += sum(spec.num_bytes for spec in tensor_specs(blob).values())
    return total


# ----- by hand ------------------------------------------------------------------------------------


def test_llama_7b_rank_8_on_queries_and_values() -> None:
    found = account("llama-7b", LoraSettings())
    assert found.trained == 2 * 32 * 8 * (4096 + 4096) == 4_194_304
    assert (
        found.frozen == 32 * (4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096) + 4096 + 2 * 32000 * 4096
    )
    assert found.share == 4_194_304 / (6_738_415_616 + 4_194_304)
    assert found.trained_bytes == 16 * 2**20
    assert found.optimizer_bytes == 32 * 2**20
    assert tensor_bytes(found, "float32") == 4 * 4_194_304
    assert tensor_bytes(found, "bfloat16") == 2 * 4_194_304
    assert tensor_bytes(found, "nf4") == 4_194_304 // 2 + 4 * 4_194_304 // 64
    assert found.frozen_bytes("float32") == 4 * found.frozen
    assert found.frozen_bytes("bfloat16") == 2 * found.frozen


def test_layers_count() -> None:
    lora = LoraSettings(rank=4, targets="attn.q,mlp.down", layers="0,5")
    found = account("llama3-8b", lora)
    assert found.trained == 2 * 4 * (4096 + 4096 + 4096 + 14336)
    assert list(found.blob_bytes("float32")) == ["block-0000", "block-0005"]


def test_totals_of_the_shapes_are_the_published_ones() -> None:
    published = {
        "llama-7b": 6.738e9,
        "llama3-8b": 8.030e9,
        "qwen2-7b": 7.616e9,
        "mistral-7b": 7.242e9,
        "roberta-base": 124.6e6,
    }
    assert set(published) == set(SHAPES)
    for name, parameters in published.items():
        assert account(name, LoraSettings()).footprint.parameters == pytest.approx(
            parameters, rel=0.0005
        )


@pytest.mark.parametrize(
    ("model", "per_layer"), [("llama3-8b", 442_368), ("mistral-7b", 442_368), ("qwen2-7b", 483_328)]
)
def test_figures_of_fedsoda(model: str, per_layer: int) -> None:
    """Parameters per layer and in total (the paper's 1.3 M and 1.4 M), at rank 8.

    Five of the seven matrices of a block are adapted.
    """
    found = account(model, LoraSettings(targets=FEDSODA, layers=LAST_THREE[model]))
    assert found.trained == 3 * per_layer
    one = account(model, LoraSettings(targets=FEDSODA, layers="7"))
    assert one.trained == per_layer


@pytest.mark.parametrize(
    ("model", "removed", "sampled", "interval", "printed"),
    [
        ("llama3-8b", 2, 6, 5, 1.519),
        ("llama3-8b", 3, 4, 5, 1.434),
        ("llama3-8b", 4, 3, 5, 1.392),
        ("llama3-8b", 3, 4, 2, 1.688),
        ("llama3-8b", 3, 4, 10, 1.350),
        ("qwen2-7b", 2, 6, 5, 1.659),
        ("qwen2-7b", 3, 4, 5, 1.567),
        ("qwen2-7b", 4, 3, 5, 1.521),
        ("qwen2-7b", 3, 4, 2, 1.844),
        ("qwen2-7b", 3, 4, 10, 1.475),
    ],
)
def test_megabytes_a_round_of_fedsoda(
    model: str, removed: int, sampled: int, interval: int, printed: float
) -> None:
    """Megabytes per round against the values that the paper prints.

    Each round sends three adapted layers up and down. Every ``interval`` rounds it also sends down
    the layers of the ``sampled`` groups of ``removed`` blocks. The paper counts half a byte per
    element; scales add 1/16 of a byte.
    """
    trained = account(model, LoraSettings(targets=FEDSODA, layers=LAST_THREE[model]))
    sent = account(model, LoraSettings(targets=FEDSODA, layers=f"0-{sampled - 1}"))
    megabytes = (2 * tensor_bytes(trained, "nf4") + tensor_bytes(sent, "nf4") / interval) / 2**20
    assert megabytes * 0.5 / 0.5625 == pytest.approx(printed, abs=0.0006)


def test_roberta_trains_its_head() -> None:
    found = account("roberta-base", LoraSettings(), num_labels=3)
    head = 768 * 768 + 768 + 3 * 768 + 3
    assert found.trained == 2 * 12 * 8 * (768 + 768) + head
    assert found.frozen == found.footprint.parameters - head
    assert found.frozen_bytes("bfloat16") == 2 * found.frozen
    assert [*found.blob_bytes("float32")][-1] == "head"
    assert tensor_bytes(found, "float32") == 4 * found.trained


# ----- against tiny tuned models ------------------------------------------------------------------


def tuned(
    directory: Path, model_type: str, base: Base, dtype: torch.dtype
) -> tuple[OpenedModel, Any, dict[str, Any]]:
    """Return a loaded model with adapters, and the trained parameters by blob key and name."""
    model = OpenedModel(directory)
    labels = 3 if model_type == "roberta" else None
    whole = load_whole(model, Computing(torch.device("cpu"), dtype, 1), base, num_labels=labels)
    found = account(str(directory), LORA, 3)
    parameters: dict[str, Any] = dict(put_in(whole, model.family, found.adapters, 2, 0.0))
    if head := head_parameters(model.family, whole):
        parameters["head"] = {name: parameter.requires_grad_() for name, parameter in head.items()}
    return model, whole, parameters


@pytest.mark.parametrize("model_type", sorted(TINY))
def test_parameters_are_those_that_peft_counts(model_type: str, tmp_path: Path) -> None:
    from peft import get_peft_model

    directory = save_tiny(tmp_path, model_type)
    found = account(str(directory), LORA, 3)
    made = AutoModelForSequenceClassification if model_type == "roberta" else AutoModelForCausalLM
    more = {"num_labels": 3} if model_type == "roberta" else {}
    whole = made.from_config(AutoConfig.from_pretrained(directory, **more))
    peft = get_peft_model(whole, lora_config(OpenedModel(directory).family, found.adapters, 2, 0.0))
    trained, everything = peft.get_nb_trainable_parameters()
    # peft trains a copy of the head and keeps the original.
    copies = found.footprint.head if model_type == "roberta" else 0
    assert (trained, everything - copies) == (found.trained, found.frozen + found.trained)
    assert found.share == trained / (everything - copies)


@pytest.mark.parametrize("payload", ["float32", "bfloat16", "nf4"])
@pytest.mark.parametrize("model_type", ["llama", "roberta"])
def test_bytes_are_those_of_blobs_of_a_tuned_model(
    model_type: str, payload: Payload, tmp_path: Path
) -> None:
    _, _, parameters = tuned(save_tiny(tmp_path, model_type), model_type, "float32", torch.float32)
    with torch.no_grad():
        for block in parameters.values():
            for parameter in block.values():
                parameter.add_(torch.linspace(-1, 1, parameter.numel()).view(parameter.shape))
    blobs = {key: pack_adapters(block, payload)[0] for key, block in values(parameters).items()}
    found = account(str(tmp_path), LORA, 3).blob_bytes(payload)
    assert found == {key: len(blob) for key, blob in blobs.items()}
    common = {
        "lineage": BY_HAND,
        "server_round": 1,
        "client": 0,
        "attempt": 1,
        "part": 0,
        "num_parts": 1,
    }
    header = Header.model_validate(
        {"schema_version": SCHEMA_VERSION, "method": "fedpetuning", "kind": "train", **common}
    )
    report = TuningReport(
        seconds=1.0, samples=9, skipped_steps=0, rank=1, blob_sha256=["0" * 64] * len(blobs)
    )
    beside = num_bytes(write(Letter(header, report.model_dump(), blobs))) - sum(found.values())
    assert beside < 1000 + 64 * len(blobs)


@pytest.mark.parametrize("model_type", ["llama", "roberta"])
def test_training_memory_is_that_of_a_step(model_type: str, tmp_path: Path) -> None:
    directory = save_tiny(tmp_path, model_type)
    _, whole, parameters = tuned(directory, model_type, "float32", torch.float32)
    flat = [parameter for block in parameters.values() for parameter in block.values()]
    optimizer = torch.optim.AdamW(flat)
    whole(input_ids=torch.arange(2, 10).view(2, 4)).logits.sum().backward()
    optimizer.step()
    found = account(str(directory), LORA, 3)
    assert sum(parameter.nbytes for parameter in flat) == found.trained_bytes
    assert sum(parameter.grad.nbytes for parameter in flat) == found.trained_bytes
    moments = [
        state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")
    ]
    assert sum(moment.nbytes for moment in moments) == found.optimizer_bytes
    frozen = {
        p.data_ptr(): p.nbytes for p in whole.parameters() if not any(p is one for one in flat)
    }
    assert sum(frozen.values()) == found.frozen_bytes("float32")


BASES: list[tuple[Base, torch.dtype]] = [
    ("float32", torch.float32),
    ("bfloat16", torch.bfloat16),
    ("nf4", torch.float32),
    ("nf4", torch.bfloat16),
]


@pytest.mark.parametrize(("base", "dtype"), BASES)
@pytest.mark.parametrize("model_type", sorted(TINY))
def test_activations_are_those_that_a_real_step_saves(
    model_type: str, base: Base, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Compare with every tensor that autograd saves in a real forward pass, without the weights.

    Tensors are identified by the address of their memory.
    """
    _, whole, _ = tuned(save_tiny(tmp_path, model_type), model_type, base, dtype)
    held = {
        tensor.untyped_storage().data_ptr() for tensor in (*whole.parameters(), *whole.buffers())
    }
    saved: dict[int, torch.Tensor] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in held:
            saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    tokens = torch.arange(2, 44).view(3, 14)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        logits = whole.train()(
            input_ids=tokens, attention_mask=torch.ones_like(tokens)
        ).logits.float()
        if model_type == "roberta":
            torch.nn.functional.cross_entropy(logits, torch.tensor([0, 1, 2]))
        else:
            torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    expected = sum(tensor.untyped_storage().nbytes() for tensor in saved.values())
    assert account(str(tmp_path), LORA, 3).activation_bytes(3, 14, dtype) == expected


# ----- refusals -----------------------------------------------------------------------------------


def test_an_unknown_shape_is_told_the_known_ones() -> None:
    with pytest.raises(
        EspalierError,
        match=(
            r"--model 'llama-8b': is no known shape \(llama-7b, llama3-8b, .*roberta-base\), and no"
        ),
    ):
        account("llama-8b", LoraSettings())


def test_a_configuration_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(EspalierError, match=r"config.json: is not a JSON file"):
        account(str(tmp_path), LoraSettings())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    with pytest.raises(EspalierError, match=r"model_type = 'mamba' is not supported"):
        account(str(tmp_path), LoraSettings())


def test_adapters_that_do_not_fit_the_model_are_refused() -> None:
    with pytest.raises(
        EspalierError,
        match=(
            r"^qwen2-7b: lora.rank: 513 is larger than a side of attn.v in block 0 \(512 x 3584\)"
        ),
    ):
        account("qwen2-7b", LoraSettings(rank=513))
    with pytest.raises(
        EspalierError,
        match=r"^roberta-base: lora.targets: the model has no mlp.gate; its blocks have attn.q",
    ):
        account("roberta-base", LoraSettings(targets="mlp.gate"))
    with pytest.raises(
        EspalierError, match=r"^qwen2-7b: lora.layers = '28': the model has the blocks 0 to 27"
    ):
        account("qwen2-7b", LoraSettings(layers="28"))
    with pytest.raises(EspalierError, match=r"^roberta-base: number of labels = 1"):
        account("roberta-base", LoraSettings(), num_labels=1)
