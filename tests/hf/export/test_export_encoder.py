"""A whole exported encoder is a sequence-classification model.

This holds for all tensor names that the files of the base model use.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

from espalier.hf.export.encoder import export_encoder
from espalier.hf.opening.opened_model import OpenedModel
from tests.hf.tiny_encoders import ENCODERS, save_encoder

CLASSES = ("entailment", "neutral", "contradiction")
HEADS = {
    "bert": ("bert.pooler.dense", "classifier"),
    "roberta": ("classifier.dense", "classifier.out_proj"),
}


@pytest.mark.parametrize(
    "stored_as", ["AutoModelForMaskedLM", "AutoModel", "AutoModelForSequenceClassification"]
)
@pytest.mark.parametrize("model_type", ENCODERS)
def test_transformers_loads_edits_and_head(model_type: str, stored_as: str, tmp_path: Path) -> None:
    base = save_encoder(tmp_path / "base", model_type, stored_as)
    names = dict.fromkeys(load_file(base / "model.safetensors"), "model.safetensors")
    (base / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": names})
    )
    head = {
        "head.dense.weight": torch.randn(32, 32),
        "head.dense.bias": torch.randn(32),
        "head.out.weight": torch.randn(3, 32),
        "head.out.bias": torch.randn(3),
    }
    target = tmp_path / "model"
    export_encoder(
        OpenedModel(base),
        lambda index: {"attn.q": lambda weight: weight + index + 1},
        head,
        CLASSES,
        target,
    )

    loaded, messages = AutoModelForSequenceClassification.from_pretrained(
        target, output_loading_info=True
    )
    assert not any(messages.values())
    assert loaded.config.id2label == dict(enumerate(CLASSES))
    assert sorted(file.name for file in target.iterdir()) == ["config.json", "model.safetensors"]
    name = model_type.removeprefix("xlm-")
    before = load_file(base / "model.safetensors")
    prefix = "" if stored_as == "AutoModel" else f"{name}."
    found = loaded.state_dict()
    for block in range(2):
        attention = f"encoder.layer.{block}.attention.self"
        assert torch.equal(
            found[f"{name}.{attention}.query.weight"],
            before[f"{prefix}{attention}.query.weight"] + block + 1,
        )
        assert torch.equal(
            found[f"{name}.{attention}.key.weight"], before[f"{prefix}{attention}.key.weight"]
        )
    for path, linear in zip(HEADS[name], ("head.dense", "head.out"), strict=True):
        assert torch.equal(found[f"{path}.weight"], head[f"{linear}.weight"])
        assert torch.equal(found[f"{path}.bias"], head[f"{linear}.bias"])
    assert "problem_type" not in json.loads((target / "config.json").read_text())
