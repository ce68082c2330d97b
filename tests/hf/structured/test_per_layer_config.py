"""Blocks of different widths in the words of transformers, ``per_layer_config``."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaForCausalLM,
)

from espalier.errors import InputError
from espalier.hf.nf4.folder import quantised_config
from espalier.hf.opening.opened_model import OpenedModel
from espalier.hf.stream.edits import dense
from espalier.hf.structured import modeling_structured
from espalier.hf.structured.configuration import build_config, load_config
from espalier.hf.structured.export import best_form, export_structured
from espalier.hf.whole.model import load_whole
from espalier.models.structure import Structure
from tests.hf.structured.structured_models import DECODERS, save, uneven
from tests.hf.tiny_encoders import ENCODERS
from tests.hf.tiny_models import CPU, save_tokenizer, tiny_config, token_sequences, whole_model

SAMPLES = token_sequences(2, 8)
CODE = Path(modeling_structured.__file__)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    names = (*DECODERS, *ENCODERS)
    return {name: save(tmp_path_factory.mktemp("base"), name) for name in names}


def config_in(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


def test_widths_by_hand(saved: dict[str, Path], tmp_path: Path) -> None:
    """The base has 8 query and 4 key-value heads of width 8, and 48 channels.

    Of its four blocks the first keeps three groups and 16 channels, the second is dropped, the
    third keeps one group and 5 channels, the fourth all groups and 38 channels.
    """
    base = OpenedModel(saved["llama"])
    small = OpenedModel(base.directory, uneven(base))
    export_structured(small, dense, tmp_path / "model", "compact")
    config = config_in(tmp_path / "model")
    assert config["per_layer_config"] == {
        "0": {"num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 16},
        "1": {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 5},
        "2": {"intermediate_size": 38},
    }
    assert {key: config[key] for key in ("num_hidden_layers", "head_dim", "intermediate_size")} == {
        "num_hidden_layers": 3,
        "head_dim": 8,
        "intermediate_size": 48,
    }
    assert (config["model_type"], config["architectures"]) == ("llama", ["LlamaForCausalLM"])
    assert config["auto_map"] == {
        "AutoConfig": "modeling_structured.UnevenLlamaConfig",
        "AutoModelForCausalLM": "modeling_structured.UnevenLlamaForCausalLM",
    }
    assert "structure" not in config


def test_keys_of_many_blocks_have_equal_lengths(tmp_path: Path) -> None:
    """transformers pads them with zeros, so that they are sorted in its files."""
    from tests.hf.tiny_models import save_model

    base = OpenedModel(save_model(tmp_path / "base", tiny_config("llama", num_hidden_layers=11)))
    kept = {index: {"channels": range(20)} for index in (3, 10)}
    small = OpenedModel(base.directory, Structure.whole(base.plan).keeping(kept))
    assert list(small.config["per_layer_config"]) == ["03", "10"]


@pytest.mark.parametrize("name", [name for name in DECODERS if name != "opt"])
def test_transformers_accepts_and_writes_the_same(
    saved: dict[str, Path], tmp_path: Path, name: str
) -> None:
    base = OpenedModel(saved[name])
    small = OpenedModel(base.directory, uneven(base))
    export_structured(small, dense, tmp_path / "model", "compact")
    config = config_in(tmp_path / "model")
    assert config["model_type"] == base.config["model_type"]
    known = AutoConfig.from_pretrained(tmp_path / "model")
    assert type(known).__module__.startswith("transformers.")
    assert known.is_heterogeneous
    assert known.to_dict()["per_layer_config"] == config["per_layer_config"]
    for block, own in zip(small.plan.blocks, known.per_layer_config, strict=True):
        names = {linear.name for linear in block.linears}
        down = block.linear("mlp.down").shape
        output = block.linear("attn.o").shape
        assert own.intermediate_size == down[1]
        assert own.num_attention_heads * small.plan.head_dim == output[1]
        if "attn.k" in names:
            rows = block.linear("attn.k").shape[0]
            assert own.num_key_value_heads * small.plan.head_dim == rows


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral", "gemma3_text", "phi3", "smollm3"])
def test_transformers_refuses_weights_until_its_layers_read_the_key(
    saved: dict[str, Path], tmp_path: Path, name: str
) -> None:
    """It must not build a model with other weights, and its tokenizer loads without code."""
    base = OpenedModel(saved[name])
    save_tokenizer(tmp_path / "model")
    export_structured(
        OpenedModel(base.directory, uneven(base)), dense, tmp_path / "model", "compact"
    )
    save_tokenizer(tmp_path / "model")
    with pytest.raises(RuntimeError, match=r"mismatch|per-layer attribute"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert len(AutoTokenizer.from_pretrained(tmp_path / "model"))


def test_tokenizer_loads_without_warnings(
    saved: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    base = OpenedModel(saved["gemma2"])
    export_structured(
        OpenedModel(base.directory, uneven(base)), dense, tmp_path / "model", "compact"
    )
    settings = tmp_path / "model" / "tokenizer_config.json"
    # Then transformers derives the class of the tokenizer from that of the configuration.
    kept = {
        key: value for key, value in json.loads(settings.read_text()).items() if "class" not in key
    }
    settings.write_text(json.dumps(kept))
    with caplog.at_level("WARNING"):
        assert type(OpenedModel(tmp_path / "model").tokenizer).__name__ == "GemmaTokenizer"
    assert "per-layer" not in caplog.text


def by_hand(folder: Path, overrides: dict[int, dict[str, int]]) -> LlamaForCausalLM:
    """Write a model whose blocks keep their first heads and channels; return it with zeros.

    Nothing of Espalier takes part. Query heads of a block are those of its remaining key-value
    heads.
    """
    torch.manual_seed(3)
    config = tiny_config(
        "llama", num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=8
    )
    whole = LlamaForCausalLM(config).eval()
    tensors = {}
    with torch.no_grad():
        for index, layer in enumerate(whole.model.layers):
            own = overrides.get(index, {})
            queries = 8 * own.get("num_attention_heads", 4)
            keys = 8 * own.get("num_key_value_heads", 2)
            channels = own.get("intermediate_size", 48)
            kept = {
                "self_attn.q_proj": (queries, 32), "self_attn.k_proj": (keys, 32),
                "self_attn.v_proj": (keys, 32), "self_attn.o_proj": (32, queries),
                "mlp.gate_proj": (channels, 32), "mlp.up_proj": (channels, 32),
                "mlp.down_proj": (32, channels),
            }  # fmt: skip
            layer.self_attn.o_proj.weight[:, queries:] = 0
            layer.mlp.down_proj.weight[:, channels:] = 0
            for path, (rows, columns) in kept.items():
                weight = layer.get_submodule(path).weight
                name = f"model.layers.{index}.{path}.weight"
                tensors[name] = weight[:rows, :columns].contiguous()
    others = {name: value for name, value in whole.state_dict().items() if name not in tensors}
    folder.mkdir()
    save_file({**others, **tensors}, folder / "model.safetensors", metadata={"format": "pt"})
    document = config.to_dict() | {
        "per_layer_config": {str(index): own for index, own in overrides.items()},
        "allow_global_per_layer_attribute_access": True,
        "architectures": ["LlamaForCausalLM"],
        "auto_map": {
            "AutoConfig": f"{CODE.stem}.UnevenLlamaConfig",
            "AutoModelForCausalLM": f"{CODE.stem}.UnevenLlamaForCausalLM",
        },
    }
    (folder / "config.json").write_text(json.dumps(document, default=str))
    shutil.copyfile(CODE, folder / CODE.name)
    return whole


@torch.no_grad()
def test_shipped_code_reads_a_file_written_by_hand(tmp_path: Path) -> None:
    overrides = {
        0: {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 7},
        2: {"intermediate_size": 30},
    }
    expected = by_hand(tmp_path / "model", overrides)(input_ids=SAMPLES).logits
    found = whole_model(tmp_path / "model")
    assert type(found).__name__ == "UnevenLlamaForCausalLM"
    torch.testing.assert_close(found(input_ids=SAMPLES).logits, expected, rtol=1e-5, atol=1e-5)
    options: dict[str, Any] = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    cached = found.generate(SAMPLES, **options)
    assert torch.equal(cached, found.generate(SAMPLES, use_cache=False, **options))


@torch.no_grad()
def test_more_query_heads_per_key(tmp_path: Path) -> None:
    """A block may keep all query heads and fewer key-value heads, as in published models."""
    overrides = {1: {"num_key_value_heads": 1}}
    by_hand(tmp_path / "model", overrides)
    found = whole_model(tmp_path / "model")
    layer: Any = found.get_submodule("model.layers.1")
    assert layer.self_attn.k_proj.weight.shape == (8, 32)
    # The same as with both key-value heads equal to the one that is left.
    whole = by_hand(tmp_path / "whole", {})
    for name in ("k_proj", "v_proj"):
        weight = whole.model.layers[1].self_attn.get_submodule(name).weight
        weight[8:] = weight[:8]
    torch.testing.assert_close(
        found(input_ids=SAMPLES).logits, whole(input_ids=SAMPLES).logits, rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({0: {"rms_norm_eps": 1}}, "block 0 has rms_norm_eps"),
        ({3: {"intermediate_size": 8}}, "must be integer layer indices"),
    ],
)
def test_other_values_of_blocks_are_refused(
    tmp_path: Path, overrides: dict[int, dict[str, int]], message: str
) -> None:
    by_hand(tmp_path / "model", overrides | {1: {"intermediate_size": 48}})
    with pytest.raises(ValueError, match=message):
        whole_model(tmp_path / "model")


def test_structure_file_must_be_there(tmp_path: Path) -> None:
    """Which parts of which base a file by hand keeps is not known."""
    by_hand(tmp_path / "model", {2: {"intermediate_size": 30}})
    with pytest.raises(InputError, match=r"structure\.json"):
        OpenedModel(tmp_path / "model")


@torch.no_grad()
def test_saved_again_by_transformers(saved: dict[str, Path], tmp_path: Path) -> None:
    base = OpenedModel(saved["qwen2"])
    small = OpenedModel(base.directory, uneven(base))
    export_structured(small, dense, tmp_path / "model", "compact")
    loaded: Any = whole_model(tmp_path / "model")
    loaded.save_pretrained(tmp_path / "again")
    for key in ("per_layer_config", "model_type", "auto_map"):
        assert config_in(tmp_path / "again")[key] == config_in(tmp_path / "model")[key]
    assert (tmp_path / "again" / CODE.name).exists()
    again = whole_model(tmp_path / "again")
    assert torch.equal(
        again(input_ids=SAMPLES).logits, load_whole(small, CPU, "float32")(SAMPLES).logits
    )


@pytest.mark.parametrize("name", ["llama", "granite", "smollm3"])
@torch.no_grad()
def test_added_biases_in_the_words_of_transformers(
    saved: dict[str, Path], tmp_path: Path, name: str
) -> None:
    """Its keys add biases to other matrices of a block too, which are zeros."""
    small = with_biases(saved[name], uneven=True)
    export_structured(small, dense, tmp_path / "model", "compact")
    config = config_in(tmp_path / "model")
    assert (config["attention_bias"], config["mlp_bias"]) == (True, True)
    assert config["model_type"] == name
    assert "structure" not in config
    loaded = whole_model(tmp_path / "model")
    parts = dict(loaded.named_parameters())
    assert not parts["model.layers.0.self_attn.q_proj.bias"].any()
    assert not parts["model.layers.0.mlp.up_proj.bias"].any()
    assert parts["model.layers.0.mlp.down_proj.bias"].all()
    expected = load_whole(small, CPU, "float32")(input_ids=SAMPLES).logits
    torch.testing.assert_close(loaded(input_ids=SAMPLES).logits, expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(InputError, match="cannot be written in NF4"):
        quantised_config(small)


@torch.no_grad()
def test_equal_blocks_with_added_biases_need_no_code(
    saved: dict[str, Path], tmp_path: Path
) -> None:
    small = with_biases(saved["llama"], uneven=False)
    assert best_form(small) == "plain"
    export_structured(small, dense, tmp_path / "model", "plain")
    assert "auto_map" not in config_in(tmp_path / "model")
    loaded, found = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", output_loading_info=True, dtype=torch.float32
    )
    assert not any(found.values())
    expected = load_whole(small, CPU, "float32")(input_ids=SAMPLES).logits
    torch.testing.assert_close(loaded(input_ids=SAMPLES).logits, expected, rtol=1e-5, atol=1e-5)


def with_biases(directory: Path, *, uneven: bool) -> OpenedModel:
    """Open a cut model with biases of 1 at the output matrices."""
    base = OpenedModel(directory)
    whole = Structure.whole(base.plan)
    kept = {index: {"channels": range(20 + index * uneven)} for index in range(4)}
    structure = replace(whole.keeping(kept), added_biases=("attn.o", "mlp.down"))
    given = {
        f"model.layers.{index}.{path}.bias": torch.ones(32)
        for index in range(4)
        for path in ("self_attn.o_proj", "mlp.down_proj")
    }
    return OpenedModel(directory, structure, given)


@pytest.mark.parametrize(
    ("name", "rest"),
    [
        ("mistral", {"biases": ["attn.o", "mlp.down"]}),
        ("gemma2", {"biases": ["attn.o", "mlp.down"]}),
    ],
)
def test_biases_without_a_key_keep_their_own_type(
    saved: dict[str, Path], tmp_path: Path, name: str, rest: dict[str, Any]
) -> None:
    small = with_biases(saved[name], uneven=True)
    export_structured(small, dense, tmp_path / "model", "compact")
    config = config_in(tmp_path / "model")
    assert (config["model_type"], config["structure"]) == (f"structured-{name}", rest)
    assert len(config["per_layer_config"]) == 4


@pytest.mark.parametrize("name", ENCODERS)
def test_encoders_have_words_for_channels_only(
    saved: dict[str, Path], tmp_path: Path, name: str
) -> None:
    """Their heads share the width of the model, so transformers has no words for fewer heads."""
    base = OpenedModel(saved[name])
    whole = Structure.whole(base.plan)
    channels = OpenedModel(base.directory, whole.keeping({1: {"channels": range(20)}}))
    export_structured(channels, dense, tmp_path / "channels", "compact")
    config = config_in(tmp_path / "channels")
    assert config["model_type"] == base.config["model_type"]
    assert config["per_layer_config"] == {"1": {"intermediate_size": 20}}
    AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "channels", trust_remote_code=True
    )
    heads = OpenedModel(base.directory, whole.keeping({1: {"groups": [0, 3]}}))
    export_structured(heads, dense, tmp_path / "heads", "compact")
    config = config_in(tmp_path / "heads")
    assert config["model_type"] == f"structured-{base.config['model_type']}"
    assert config["per_layer_config"] == {"1": {"num_attention_heads": 2}}
    assert config["structure"] == {"head_dim": 8}


@torch.no_grad()
def test_compact_form_without_a_need_for_code(saved: dict[str, Path], tmp_path: Path) -> None:
    base = OpenedModel(saved["llama"])
    for name, structure in {
        "depth": Structure.whole(base.plan).with_blocks([0, 2]),
        "width": Structure.whole(base.plan).keeping(
            {index: {"channels": range(20)} for index in range(4)}
        ),
    }.items():
        small = OpenedModel(base.directory, structure)
        export_structured(small, dense, tmp_path / name, "compact")
        config = config_in(tmp_path / name)
        assert not config.keys() & {"auto_map", "per_layer_config", "structure"}
        assert not list((tmp_path / name).glob("*.py"))
        again = OpenedModel(tmp_path / name)
        assert (again.structure, again.plan) == (structure, small.plan)
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float32)
        expected = load_whole(small, CPU, "float32")(input_ids=SAMPLES).logits
        assert torch.equal(loaded(input_ids=SAMPLES).logits, expected)


def test_configuration_objects_of_espalier(saved: dict[str, Path], tmp_path: Path) -> None:
    """Espalier uses its own classes without code from the directory."""
    base = OpenedModel(saved["qwen3"])
    small = OpenedModel(base.directory, uneven(base))
    export_structured(small, dense, tmp_path / "model", "compact")
    (tmp_path / "model" / CODE.name).write_text("raise SystemExit")
    loaded = load_config(tmp_path / "model")
    assert type(loaded) is type(build_config(config_in(tmp_path / "model")))
    assert type(loaded).__module__ == modeling_structured.__name__
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", config=loaded)
    assert type(model).__name__ == "UnevenQwen3ForCausalLM"
