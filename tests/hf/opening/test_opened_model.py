"""Opening a model directory: its plan, tokenizer and hash, and the refused directories."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from espalier.errors import EspalierError
from espalier.hf.families import FAMILIES, family_of
from espalier.hf.families.family import CANONICAL_LINEARS
from espalier.hf.opening.opened_model import OpenedModel, open_model
from tests.hf.tiny_models import llama_config, save_model
from tests.tiny_model import save_tiny_llama


def change_config(directory: Path, **changes: Any) -> None:
    config = json.loads((directory / "config.json").read_text()) | changes
    (directory / "config.json").write_text(
        json.dumps({key: value for key, value in config.items() if value is not None})
    )


def change_tensors(directory: Path, change: Any) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})


# ----- plan and tokenizer -------------------------------------------------------------------------


def test_the_plan_on_paper(untied: Path) -> None:
    """Width 32, 2 key-value heads of 4 heads, 48 FFN channels, 3 blocks and 96 words."""
    plan = OpenedModel(untied).plan
    assert [(linear.name, linear.shape) for linear in plan.blocks[1].linears] == [
        ("attn.q", (32, 32)),
        ("attn.k", (16, 32)),
        ("attn.v", (16, 32)),
        ("attn.o", (32, 32)),
        ("mlp.gate", (48, 32)),
        ("mlp.up", (48, 32)),
        ("mlp.down", (32, 48)),
    ]
    assert plan.blocks[1].num_weights == 2 * 32 * 32 + 2 * 16 * 32 + 3 * 48 * 32
    assert plan.num_parameters == 3 * (plan.blocks[0].num_weights + 2 * 32) + 2 * 96 * 32 + 32


def test_a_tied_head_is_counted_once(untied: Path, tied: Path) -> None:
    assert (
        OpenedModel(untied).plan.num_parameters - OpenedModel(tied).plan.num_parameters == 96 * 32
    )


def test_text_becomes_token_ids(untied: Path) -> None:
    assert OpenedModel(untied).encode("w5 w95 unknown w0") == [5, 95, 0, 0]


def test_missing_tokenizer_is_told_on_encoding(copied: Path) -> None:
    for file in copied.glob("tokenizer*"):
        file.unlink()
    model = OpenedModel(copied)
    with pytest.raises(EspalierError, match=r"copied: the tokenizer cannot be loaded"):
        model.encode("w1")


def test_open_model_takes_directories_and_demo(
    untied: Path,
) -> None:
    assert open_model(str(untied)).plan == OpenedModel(untied).plan
    assert open_model("demo").plan.num_weights > 0


def test_families_use_canonical_names() -> None:
    for family in FAMILIES:
        assert set(family.linears) <= set(CANONICAL_LINEARS)


# ----- the hash -----------------------------------------------------------------------------------


def test_the_hash_does_not_depend_on_sharding(untied: Path, sharded: Path) -> None:
    assert OpenedModel(untied).sha256 == OpenedModel(sharded).sha256


def test_hash_ignores_file_order_and_metadata(copied: Path, untied: Path) -> None:
    tensors = load_file(copied / "model.safetensors")
    save_file(dict(reversed(tensors.items())), copied / "model.safetensors", {"note": "another"})
    assert OpenedModel(copied).sha256 == OpenedModel(untied).sha256


def one_bit(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"].view(torch.int32)[3] ^= 1


def another_name(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.other.weight"] = tensors.pop("model.norm.weight")


def another_shape(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"] = tensors["model.norm.weight"].reshape(1, -1)


def another_dtype(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"] = tensors["model.norm.weight"].view(torch.int32)


@pytest.mark.parametrize("change", [one_bit, another_name, another_shape, another_dtype])
def test_hash_covers_bits_names_shapes_and_dtypes(copied: Path, untied: Path, change: Any) -> None:
    change_tensors(copied, change)
    assert OpenedModel(copied).sha256 != OpenedModel(untied).sha256


def test_the_hash_changes_with_the_tokenizer(copied: Path, untied: Path) -> None:
    text = (copied / "tokenizer.json").read_text()
    (copied / "tokenizer.json").write_text(text.replace('"w7"', '"w7x"'))
    assert OpenedModel(copied).sha256 != OpenedModel(untied).sha256


@pytest.mark.parametrize(
    ("key", "value"), [("rms_norm_eps", 1e-3), ("rope_parameters", {"rope_theta": 5e5}), ("new", 1)]
)
def test_the_hash_changes_with_the_configuration(
    copied: Path, untied: Path, key: str, value: Any
) -> None:
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(config | {key: value}))
    assert OpenedModel(copied).sha256 != OpenedModel(untied).sha256


@pytest.mark.parametrize("key", ["transformers_version", "_name_or_path", "dtype"])
def test_hash_ignores_who_wrote_configuration(copied: Path, untied: Path, key: str) -> None:
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps({key: "5.14.0", **config} | {key: "bfloat16"}))
    assert OpenedModel(copied).sha256 == OpenedModel(untied).sha256


def test_hash_changes_with_model_s_dtype(untied: Path, tmp_path: Path) -> None:
    halved = save_model(tmp_path / "bf16", llama_config(), dtype=torch.bfloat16)
    assert OpenedModel(halved).sha256 != OpenedModel(untied).sha256


# ----- refusals -----------------------------------------------------------------------------------


def test_directory_without_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(EspalierError, match=r"nothing: there is no such directory; name that"):
        open_model(str(tmp_path / "nothing"))
    (tmp_path / "nothing").mkdir()
    with pytest.raises(EspalierError, match=r"nothing: has no config.json; name the directory"):
        open_model(str(tmp_path / "nothing"))


def test_hub_name_is_told_from_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    told = r"model = 'owner/name': there is no such directory .* has no copy of such a model"
    with pytest.raises(EspalierError, match=told):
        open_model("owner/name")
    (tmp_path / "owner" / "name").mkdir(parents=True)
    with pytest.raises(EspalierError, match=r"has no config\.json"):
        open_model("owner/name")


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        pytest.param("[]"),
    ],
)
def test_a_damaged_configuration_is_named(copied: Path, content: str) -> None:
    (copied / "config.json").write_text(content)
    with pytest.raises(
        EspalierError, match=r"config.json: (is not a JSON file: |contains a JSON list)"
    ):
        OpenedModel(copied)


@pytest.mark.parametrize(
    "key", ["num_local_experts", "num_experts", "n_routed_experts", "moe_intermediate_size"]
)
def test_mixture_of_experts_is_refused(copied: Path, key: str) -> None:
    change_config(copied, **{key: 8})
    with pytest.raises(EspalierError, match=rf"config.json: {key} = 8; mixture-of-experts"):
        OpenedModel(copied)


def test_a_quantised_model_is_refused_by_its_key(copied: Path) -> None:
    change_config(copied, quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(EspalierError, match=r"config.json: quantization_config is set"):
        OpenedModel(copied)


@pytest.mark.parametrize("model_type", ["mamba", None, ["llama"]])
def test_unknown_type_lists_known_ones(copied: Path, model_type: Any) -> None:
    change_config(copied, model_type=model_type)
    with pytest.raises(
        EspalierError, match=r"config.json: model_type = .* is not supported; supported are .*llama"
    ):
        OpenedModel(copied)


def test_quantisation_is_told_before_unknown_type() -> None:
    with pytest.raises(EspalierError, match="quantization_config"):
        family_of({"model_type": "mamba", "quantization_config": {"bits": 4}}, "config.json")


@pytest.mark.parametrize("number", [0, -1, "3", 2.0, None])
def test_a_wrong_number_of_blocks_names_the_key(copied: Path, number: Any) -> None:
    change_config(copied, num_hidden_layers=number)
    with pytest.raises(
        EspalierError,
        match=(
            r"config.json(: num_hidden_layers = | has no num_hidden_layers, so transformers"
            r" assumes 32)"
        ),
    ):
        OpenedModel(copied)


def test_a_missing_linear_is_named(copied: Path) -> None:
    change_tensors(copied, lambda tensors: tensors.pop("model.layers.2.mlp.up_proj.weight"))
    with pytest.raises(
        EspalierError, match=r"copied: tensor model.layers.2.mlp.up_proj.weight is missing"
    ):
        OpenedModel(copied)


def test_surplus_configured_block_names_a_tensor(
    copied: Path,
) -> None:
    change_config(copied, num_hidden_layers=4)
    with pytest.raises(EspalierError, match=r"model.layers.3.self_attn.q_proj.weight is missing"):
        OpenedModel(copied)


def test_a_linear_that_is_no_matrix_is_named(copied: Path) -> None:
    name = "model.layers.0.self_attn.k_proj.weight"
    change_tensors(copied, lambda tensors: tensors.update({name: tensors[name].flatten().clone()}))
    with pytest.raises(EspalierError, match=rf"{name} is F32 .*must be a matrix"):
        OpenedModel(copied)


def test_moved_model_is_found_by_its_new_name(untied: Path, tmp_path: Path) -> None:
    moved = shutil.copytree(untied, tmp_path / "moved")
    assert OpenedModel(Path(moved)).sha256 == OpenedModel(untied).sha256


@pytest.mark.parametrize(
    "key", ["attn_implementation", "_attn_implementation", "_attn_implementation_internal"]
)
def test_named_code_is_not_fetched(
    tmp_path: Path, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers would download a kernel of that name from the Hub and run it.

    The configuration file may come from a server.
    """
    model = save_tiny_llama(tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, key: "kernels-community/flash-attn2"}))
    asked = list[str]()
    monkeypatch.setattr(
        "transformers.integrations.hub_kernels.get_kernel",
        lambda name, *_, **__: asked.append(name),
    )
    skeleton = OpenedModel(model).new_skeleton()
    assert not asked
    assert skeleton.config._attn_implementation in ("sdpa", "eager")
