"""Encoders with cut heads and channels compute, train and export like whole ones with zeros."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from espalier.hf.export.encoder import check_encoder, export_encoder
from espalier.hf.export.model import ExportError
from espalier.hf.opening.opened_model import OpenedModel
from espalier.hf.structured.selection import cut_adapter_plan, cut_trained
from espalier.hf.whole.adapters import merged
from espalier.hf.whole.model import load_whole
from espalier.models.adapters import HEAD_KEY, adapter_plan
from espalier.models.plan import block_key
from espalier.models.structure import Structure, group_costs
from espalier.settings.run import parse
from espalier.training.adapted_model import AdaptedModel
from tests.hf.structured.structured_models import masked, uneven
from tests.hf.tiny_encoders import ENCODERS, save_encoder
from tests.hf.tiny_models import CPU, save_tokenizer, token_sequences

SETTINGS = parse(
    {
        "method": "fedpetuning",
        "lora.rank": 3,
        "lora.alpha": 6.0,
        "lora.targets": "all",
        "training.base": "float32",
    }
)
CLASSES = ("entailment", "neutral", "contradiction")
HEADS = ("classifier", "bert.pooler")
"""Prefixes of the tensor names of the heads."""
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Four blocks of width 32, each with four heads of width 8 and 48 channels."""
    folders = {name: tmp_path_factory.mktemp(name) for name in ENCODERS}
    for name, folder in folders.items():
        save_tokenizer(folder)
        save_encoder(folder, name, num_hidden_layers=4, **NO_DROPOUT)
    return folders


@pytest.mark.parametrize("name", ENCODERS)
def test_units_cost_what_goes_with_them(saved: dict[str, Path], name: str) -> None:
    """Cost of a prunable group: parameters that are removed with it.

    A head has 8 rows of query, key and value with biases, and 8 columns. A channel has a row, its
    bias and a column.
    """
    base = OpenedModel(saved[name])
    head, channel = group_costs(base.plan, base.plan.blocks[0])
    assert (head, channel) == (3 * 8 * 33 + 8 * 32, 33 + 32)
    cut = Structure.whole(base.plan).keeping({1: {"groups": [0, 3]}, 2: {"channels": range(1, 48)}})
    assert (
        OpenedModel(base.directory, cut).plan.num_parameters
        == base.plan.num_parameters - 2 * head - channel
    )


@pytest.mark.parametrize("how", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ENCODERS)
@torch.no_grad()
def test_smaller_logits_equal_masked_with_padding(
    saved: dict[str, Path], name: str, how: str
) -> None:
    base = OpenedModel(saved[name])
    structure = uneven(base, drop=False)
    small = load_whole(OpenedModel(base.directory, structure), CPU, "float32", num_labels=3, seed=5)
    whole = AutoModelForSequenceClassification.from_pretrained(base.directory, num_labels=3).eval()
    whole.load_state_dict(
        {key: value for key, value in small.state_dict().items() if key.startswith(HEADS)},
        strict=False,
    )
    wanted = masked(whole, base, structure)
    for model in (small, wanted):
        model.set_attn_implementation(how)
    samples = token_sequences(3, 9)
    seen = torch.ones(3, 9, dtype=torch.int64)
    seen[1, 4:] = 0
    expected = wanted(input_ids=samples, attention_mask=seen).logits
    torch.testing.assert_close(
        small(input_ids=samples, attention_mask=seen).logits, expected, rtol=1e-5, atol=1e-5
    )
    assert (
        small.num_parameters()
        == sum(value.numel() for key, value in small.named_parameters() if key.startswith(HEADS))
        + OpenedModel(base.directory, structure).plan.num_parameters
    )


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", ENCODERS)
def test_smaller_encoder_has_masked_gradients(
    saved: dict[str, Path], name: str, checkpointing: bool
) -> None:
    """Compare the gradients of LoRA on all matrices, element by element, and of the whole head."""
    base = OpenedModel(saved[name])
    structure = uneven(base, drop=False)
    adapters = adapter_plan(base.plan, SETTINGS.lora, 3)
    tensors = drawn(adapters.shapes())
    # Cut groups must have no effect in the whole model either.
    for block in structure.blocks:
        own = tensors[block_key(block.source)]
        own["attn.o.lora_a"][:, [at for at in range(32) if at // 8 not in block.groups]] = 0
        own["mlp.down.lora_a"][:, [at for at in range(48) if at not in block.channels]] = 0
    whole = AdaptedModel.load(base, CPU, SETTINGS, adapters)
    masked(whole.whole, base, structure)
    small = AdaptedModel.load(
        OpenedModel(base.directory, structure),
        CPU,
        SETTINGS,
        cut_adapter_plan(adapters, base.plan, structure),
    )
    whole.set(tensors)
    small.set(cut_trained(tensors, base.plan, structure))
    found, expected = (gradients(model, checkpointing) for model in (small, whole))
    assert found.keys() == expected.keys() == adapters.shapes().keys()
    for key, own in cut_trained(expected, base.plan, structure).items():
        for tensor, gradient in own.items():
            torch.testing.assert_close(found[key][tensor], gradient, rtol=1e-3, atol=1e-5)
            assert gradient.any()


def drawn(shapes: Any) -> dict[str, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return {
        key: {name: 0.1 * torch.randn(shape, generator=generator) for name, shape in own.items()}
        for key, own in shapes.items()
    }


def gradients(model: AdaptedModel, checkpointing: bool) -> dict[str, dict[str, torch.Tensor]]:
    """Return the gradients of one batch."""
    if checkpointing:
        enable = getattr(
            model.whole,
            "activation_checkpointing_enable",
            model.whole.gradient_checkpointing_enable,
        )
        enable({"use_reentrant": False})
    model.whole.train()
    model.whole(input_ids=token_sequences(3, 9), labels=torch.tensor([0, 2, 1])).loss.backward()
    found = {
        key: {name: value.grad for name, value in own.items()}
        for key, own in model.parameters.items()
    }
    assert all(gradient is not None for own in found.values() for gradient in own.values())
    return found  # type: ignore[return-value]  # as asserted


# ----- export -------------------------------------------------------------------------------------


@pytest.mark.parametrize("uneven_blocks", [True, False])
@pytest.mark.parametrize("name", ENCODERS)
@torch.no_grad()
def test_smaller_encoder_is_written_with_its_head(
    saved: dict[str, Path], tmp_path: Path, name: str, uneven_blocks: bool
) -> None:
    """Only encoders with unequal blocks need modelling code in their directory.

    Blocks with 40 channels and all heads each need none.
    """
    base = OpenedModel(saved[name])
    alike = Structure.whole(base.plan).keeping(
        {index: {"channels": range(index, 40 + index)} for index in range(4)}
    )
    small = OpenedModel(base.directory, uneven(base, drop=False) if uneven_blocks else alike)
    adapters = adapter_plan(small.plan, SETTINGS.lora, 3)
    meant = AdaptedModel.load(small, CPU, SETTINGS, adapters)
    tensors = drawn(adapters.shapes())
    meant.set(tensors)
    edits = merged(adapters, tensors)
    target = tmp_path / "written"
    export_encoder(small, edits, tensors[HEAD_KEY], CLASSES, target, card="# smaller")
    loaded, messages = AutoModelForSequenceClassification.from_pretrained(
        target, output_loading_info=True
    )
    assert not any(messages.values())
    samples = token_sequences(3, 9)
    expected = meant.whole(input_ids=samples).logits
    torch.testing.assert_close(
        loaded.eval()(input_ids=samples).logits, expected, rtol=1e-4, atol=1e-4
    )
    check_encoder(small, edits, tensors[HEAD_KEY], target)
    config = json.loads((target / "config.json").read_text())
    files = {file.name for file in target.iterdir()}
    assert ("structured" in config["model_type"], "auto_map" in config) == (
        uneven_blocks,
        uneven_blocks,
    )
    assert config["architectures"] == [type(loaded).__name__]
    assert loaded.config.id2label == dict(enumerate(CLASSES))
    beside = {
        "config.json",
        "model.safetensors",
        "README.md",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert files - {"special_tokens_map.json"} == beside | (
        {"structure.json", "modeling_structured.py"} if uneven_blocks else set()
    )
    assert OpenedModel(target).plan.num_parameters == small.plan.num_parameters
    spoilt = {key: value + 1 for key, value in tensors[HEAD_KEY].items()}
    with pytest.raises(ExportError, match="logits of the reloaded model differ"):
        check_encoder(small, edits, spoilt, target)
