"""Methods refuse a family with which they cannot be exact, in one sentence, before a run."""

from typing import Any

import pytest

from espalier.errors import InputError
from espalier.hf.opening.opened_model import OpenedModel
from espalier.models.adapters import adapter_plan
from espalier.settings.registry import METHODS
from espalier.settings.run import parse
from espalier.settings.tables.lora import LoraSettings
from strategies.base.method import require_fit
from tests.hf.tiny_models import MIXTURES, save_model, tiny_config

HEADS = "heads cannot be removed, because a norm averages over all heads of a block; name a model"
ROTATED = "the residual stream can be rotated where only RMS norms read it, .*; name one of them"
RESIDUAL = "have no residual dimensions that can be removed; name one like LLaMA"
REFUSED = {
    ("olmo2", "fedspine"): HEADS,
    ("olmo2", "slicegpt"): ROTATED,
    ("olmo2", "sft-p"): RESIDUAL,
    ("gemma2", "slicegpt"): ROTATED,
    ("gemma3_text", "slicegpt"): ROTATED,
}
KINDS = ("granite", "smollm3", "olmo2", "phi3", "gemma2", "gemma3_text")
TUNING = ("fedpetuning", "fed-sb", "flora", "hetlora")
SMALL: dict[str, dict[str, Any]] = {
    "fedsoda": {
        "fedsoda.groups": 1,
        "fedsoda.group-layers": 1,
        "fedsoda.emulator": "stored",
        "training.base": "float32",
    }
}
"""Settings that fit six blocks, by method."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, OpenedModel]:
    kinds = (*KINDS, *MIXTURES)
    return {
        kind: OpenedModel(
            save_model(tmp_path_factory.mktemp(kind), tiny_config(kind, num_hidden_layers=6))
        )
        for kind in kinds
    }


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", KINDS)
def test_only_inexact_methods_are_refused(
    models: dict[str, OpenedModel], kind: str, method: str
) -> None:
    settings = parse({"method": method, "lora.targets": "all", **SMALL.get(method, {})})
    if reason := REFUSED.get((kind, method)):
        with pytest.raises(InputError, match=reason):
            require_fit(settings, models[kind], {})
    else:
        require_fit(settings, models[kind], {})


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", MIXTURES)
def test_mixtures_of_experts_are_only_tuned(
    models: dict[str, OpenedModel], kind: str, method: str
) -> None:
    settings = parse({"method": method})
    if method in TUNING:
        require_fit(settings, models[kind], {})
        return
    with pytest.raises(InputError, match=rf"^method = '{method}': .*mixture of experts .*; set"):
        require_fit(settings, models[kind], {})


@pytest.mark.parametrize("method", TUNING)
@pytest.mark.parametrize("kind", KINDS)
def test_tuning_fits_with_the_default_matrices(
    models: dict[str, OpenedModel], kind: str, method: str
) -> None:
    require_fit(parse({"method": method}), models[kind], {})


@pytest.mark.parametrize(
    ("targets", "matrices"),
    [
        ("attn.q,attn.v", {"attn.qkv"}),
        ("mlp.up,attn.qkv,attn.k,mlp.down", {"attn.qkv", "mlp.gateup", "mlp.down"}),
    ],
)
def test_a_part_of_a_fused_matrix_names_the_whole(
    models: dict[str, OpenedModel], targets: str, matrices: set[str]
) -> None:
    adapters = adapter_plan(models["phi3"].plan, LoraSettings(targets=targets))
    assert {adapter.linear.name for _, adapter in adapters} == matrices
    assert len(list(adapters)) == 6 * len(matrices)


def test_feed_forward_matrices_of_experts_are_refused(models: dict[str, OpenedModel]) -> None:
    settings = parse({"method": "fedpetuning", "lora.targets": "attn.q,mlp.up"})
    with pytest.raises(InputError, match=r"lora.targets: the model has no mlp.up; its blocks have"):
        require_fit(settings, models["mixtral"], {})
