"""BERT, RoBERTa and XLM-RoBERTa open for tuning and are refused for pruning.

The tests cover the different tensor names that their files use.
"""

import math
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForSequenceClassification

from espalier.errors import EspalierError
from espalier.hf.families.family import Family
from espalier.hf.families.table import BERT, ROBERTA
from espalier.hf.opening.opened_model import OpenedModel
from espalier.hf.stream.block_stream import BlockStream
from espalier.models.structure import sizes_of
from tests.hf.tiny_encoders import ENCODERS, LINEARS, encoder_config, save_encoder
from tests.hf.tiny_models import CPU, llama_config, save_model

STORED_AS = ["AutoModelForMaskedLM", "AutoModel", "AutoModelForSequenceClassification"]
BASE = {"bert": "bert", "roberta": "roberta", "xlm-roberta": "roberta"}


@pytest.fixture(params=ENCODERS)
def model_type(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("stored_as", STORED_AS)
def test_plan_names_linears_as_in_files(model_type: str, stored_as: str, tmp_path: Path) -> None:
    opened = OpenedModel(save_encoder(tmp_path / "saved", model_type, stored_as))
    prefix = "" if stored_as == "AutoModel" else f"{BASE[model_type]}."
    assert {linear.parameter for block in opened.plan.blocks for linear in block.linears} == {
        f"{prefix}encoder.layer.{index}.{path}.weight"
        for index in range(2)
        for path in LINEARS.values()
    }
    for block in opened.plan.blocks:
        assert {linear.name: linear.parameter for linear in block.linears} == {
            name: f"{prefix}encoder.layer.{block.index}.{path}.weight"
            for name, path in LINEARS.items()
        }
    assert [linear.shape for linear in opened.plan.blocks[0].linears] == 4 * [(32, 32)] + [
        (48, 32),
        (32, 48),
    ]


@pytest.mark.parametrize("stored_as", STORED_AS)
def test_parameters_exclude_pooler_and_heads(
    model_type: str, stored_as: str, tmp_path: Path
) -> None:
    opened = OpenedModel(save_encoder(tmp_path / "saved", model_type, stored_as))
    attention = 4 * (32 * 32 + 32)
    feed_forward = 2 * 48 * 32 + 48 + 32
    norm = 2 * 32
    embeddings = (96 + 64 + 2) * 32 + norm
    assert opened.plan.num_parameters == 2 * (attention + feed_forward + 2 * norm) + embeddings


def test_names_of_the_first_bert_files(tmp_path: Path) -> None:
    """Old BERT files call weight and bias of the norms gamma and beta."""
    directory = save_encoder(tmp_path / "saved", "bert", "AutoModelForMaskedLM")
    tensors = load_file(directory / "model.safetensors")
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ): value
        for name, value in tensors.items()
    }
    assert old.keys() != tensors.keys()
    save_file(old, directory / "model.safetensors", {"format": "pt"})
    opened = OpenedModel(directory)
    norm = "bert.encoder.layer.1.output.LayerNorm"
    assert opened.stored_name(f"{norm}.weight") == f"{norm}.gamma"
    assert opened.stored_name(f"{norm}.bias") == f"{norm}.beta"
    assert opened.stored_name("classifier.weight") is None


def test_skeleton_is_the_transformers_classifier(model_type: str, tmp_path: Path) -> None:
    opened = OpenedModel(save_encoder(tmp_path / "saved", model_type))
    skeleton = opened.new_skeleton(3)
    expected = AutoModelForSequenceClassification.from_config(
        encoder_config(model_type, num_labels=3)
    )
    assert type(skeleton) is type(expected)
    assert {name: value.shape for name, value in skeleton.named_parameters()} == {
        name: value.shape for name, value in expected.named_parameters()
    }
    assert all(value.is_meta for value in skeleton.parameters())
    assert not skeleton.training


def test_linears_and_head_have_family_paths(model_type: str, tmp_path: Path) -> None:
    opened = OpenedModel(save_encoder(tmp_path / "saved", model_type))
    skeleton = opened.new_skeleton(3)
    for block in skeleton.get_submodule(opened.family.blocks):
        found = {path for path, module in block.named_modules() if isinstance(module, nn.Linear)}
        assert found == set(opened.family.linears.values())
    head = {name: skeleton.get_submodule(path) for name, path in opened.family.head_linears.items()}
    assert {name: tuple(linear.weight.shape) for name, linear in head.items()} == {
        "head.dense": (32, 32),
        "head.out": (3, 32),
    }
    base = opened.plan.num_parameters
    assert (
        sum(math.prod(value.shape) for value in skeleton.parameters())
        == base + 32 * 32 + 32 + 3 * 32 + 3
    )


def test_attention_groups_are_heads(model_type: str, tmp_path: Path) -> None:
    opened = OpenedModel(save_encoder(tmp_path / "saved", model_type))
    assert (sizes_of(opened.plan, opened.plan.blocks[0]).groups, opened.plan.heads_per_group) == (
        4,
        1,
    )


# ----- refusals -----------------------------------------------------------------------------------


def test_encoder_is_refused_for_pruning(model_type: str, tmp_path: Path) -> None:
    """Both entry points refuse: the server's skeleton and a client's block stream."""
    opened = OpenedModel(save_encoder(tmp_path / "saved", model_type))
    with pytest.raises(
        EspalierError, match=r"config.json: model_type .* an encoder; .* not pruned: name a decoder"
    ):
        opened.new_skeleton()
    with pytest.raises(EspalierError, match="an encoder"):
        BlockStream(opened, CPU)


def test_decoder_is_refused_for_classification(tmp_path: Path) -> None:
    opened = OpenedModel(save_model(tmp_path / "saved", llama_config()))
    with pytest.raises(
        EspalierError, match=r"config.json: model_type .* a decoder; .* name an encoder"
    ):
        opened.new_skeleton(2)


def test_a_missing_linear_is_named(tmp_path: Path) -> None:
    directory = save_encoder(tmp_path / "saved", "roberta")
    tensors = load_file(directory / "model.safetensors")
    del tensors["roberta.encoder.layer.1.output.dense.weight"]
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        EspalierError, match=r"tensor roberta.encoder.layer.1.output.dense.weight is missing"
    ):
        OpenedModel(directory)


@pytest.mark.parametrize("stored_as", STORED_AS)
def test_surplus_blocks_in_files_are_refused(stored_as: str, tmp_path: Path) -> None:
    directory = save_encoder(tmp_path / "saved", "roberta", stored_as)
    path = directory / "config.json"
    path.write_text(path.read_text().replace('"num_hidden_layers": 2', '"num_hidden_layers": 1'))
    with pytest.raises(
        EspalierError, match=r"num_hidden_layers = 1, but the files contain more blocks"
    ):
        OpenedModel(directory)


@pytest.mark.parametrize(
    "changes",
    [
        {"base": ""},
        {"head_linears": {}},
        {"head_linears": {"head.middle": "classifier"}},
        {"kind": "decoder"},
    ],
)
def test_contradictory_family_is_refused(changes: dict[str, Any]) -> None:
    fields = {
        "name": "x",
        "model_types": ("x",),
        "kind": "encoder",
        "blocks": "x.layer",
        "linears": {},
        "base": "x",
    }
    fields["head_linears"] = {"head.out": "classifier"}
    assert Family(**fields).auto_class == "AutoModelForSequenceClassification"
    with pytest.raises(ValueError, match="family x: "):
        Family(**fields | changes)


def test_file_names_come_in_search_order() -> None:
    assert list(BERT.file_names("bert.embeddings.LayerNorm.bias")) == [
        "bert.embeddings.LayerNorm.bias",
        "embeddings.LayerNorm.bias",
        "bert.embeddings.LayerNorm.beta",
        "embeddings.LayerNorm.beta",
    ]
    assert list(ROBERTA.file_names("classifier.dense.weight")) == ["classifier.dense.weight"]


def test_the_hash_changes_with_the_words_of_bert(tmp_path: Path) -> None:
    directory = save_encoder(tmp_path / "saved", "bert")
    before = OpenedModel(directory).sha256
    (directory / "vocab.txt").write_text("[PAD]\n[UNK]\n")
    assert OpenedModel(directory).sha256 != before
