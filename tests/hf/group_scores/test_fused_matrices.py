"""A Phi model has the scores and smaller models of a LLaMA with the same matrices one by one."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from espalier.hf.group_scores.taylor import taylor_scores
from espalier.hf.opening.opened_model import OpenedModel
from espalier.methods.pruning.llm_pruner import LlmPrunerSettings
from espalier.models.groups import Groups
from espalier.models.structure import GROUP_KINDS
from tests.hf.tiny_models import CPU, save_model, tiny_config, token_sequences, whole_model

EPSILON = {"rms_norm_eps": 1e-5}
SAMPLES = token_sequences(3, 9)


@pytest.fixture
def models(tmp_path: Path) -> tuple[OpenedModel, OpenedModel]:
    """Return a Phi model, and a LLaMA with the same parameters."""
    fused = save_model(tmp_path / "phi", tiny_config("phi3", **EPSILON))
    single = save_model(tmp_path / "llama", tiny_config("llama", **EPSILON))
    tensors = {}
    for name, value in load_file(fused / "model.safetensors").items():
        before, found, _ = name.partition("qkv_proj")
        if found:
            for part, rows in zip("qkv", value.split((32, 16, 16)), strict=True):
                tensors[f"{before}{part}_proj.weight"] = rows.clone()
        elif "gate_up_proj" in name:
            for part, rows in zip(("gate", "up"), value.chunk(2), strict=True):
                tensors[name.replace("gate_up", part)] = rows.clone()
        else:
            tensors[name] = value
    save_file(tensors, single / "model.safetensors", {"format": "pt"})
    return OpenedModel(fused), OpenedModel(single)


@torch.no_grad()
def test_both_models_are_the_same(models: tuple[OpenedModel, OpenedModel]) -> None:
    found, expected = (whole_model(one.directory)(input_ids=SAMPLES).logits for one in models)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("element", ["signed", "absolute", "squared"])
def test_groups_have_the_same_scores_and_costs(
    models: tuple[OpenedModel, OpenedModel], element: str
) -> None:
    job = LlmPrunerSettings.model_validate({"element": element, "spare-first": 0, "spare-last": 0})
    found, expected = (taylor_scores(one, CPU, SAMPLES, job, len(SAMPLES)) for one in models)
    for index in range(2):
        for kind in GROUP_KINDS:
            torch.testing.assert_close(
                found[index][kind], expected[index][kind], rtol=1e-4, atol=1e-7
            )
    costs = [Groups.of(one.plan).costs.tolist() for one in models]
    assert costs[0] == costs[1]
