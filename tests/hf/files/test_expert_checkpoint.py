"""Experts of a block are one tensor in memory, and one by one or stacked in files."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from espalier.errors import InputError
from espalier.hf.files.tensor_pieces import pieces
from espalier.hf.opening.opened_model import OpenedModel
from tests.hf.tiny_models import MIXTURES, save_model, tiny_config


@pytest.fixture(params=MIXTURES)
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return save_model(tmp_path / "model", tiny_config(request.param))


def test_stacked_files_are_the_same_model(directory: Path) -> None:
    single = OpenedModel(directory)
    expected = (single.plan, single.sha256)
    values = {name: single.checkpoint.read(name) for name in single.checkpoint.tensors}
    assert values["model.layers.1.mlp.experts.gate_up_proj"].ndim == 3
    for name, value in values.items():
        flat = torch.cat(list(pieces(single.checkpoint, name)))
        assert torch.equal(flat, value.flatten())
        assert torch.equal(single.checkpoint.read_rows(name, 1, 3), value[1:3])
    save_file(values, directory / "model.safetensors", {"format": "pt"})
    stacked = OpenedModel(directory)
    assert (stacked.plan, stacked.sha256) == expected


def test_a_missing_expert_is_told(directory: Path) -> None:
    file = directory / "model.safetensors"
    tensors = load_file(file)
    gone = next(name for name in tensors if ".layers.1." in name and ".experts.2." in name)
    del tensors[gone]
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(InputError, match=r"experts of model.layers.1.mlp.experts.* are missing"):
        OpenedModel(directory)


def test_experts_in_four_bits_are_refused(directory: Path) -> None:
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    config["quantization_config"]["bnb_4bit_quant_type"] = "nf4"
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="experts in 4 bits cannot be read; name the model before"):
        OpenedModel(directory)
