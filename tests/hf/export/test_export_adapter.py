"""Plain peft loads an exported adapter and computes the merged model's logits; damage is found."""

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import OPTConfig, PretrainedConfig

from espalier.errors import EspalierError
from espalier.hf.export import adapter as exporting
from espalier.hf.export.adapter import check_adapter, export_adapter
from espalier.hf.export.model import ExportError, export_edited
from espalier.hf.machine.computing import Computing
from espalier.hf.opening.opened_model import OpenedModel
from espalier.hf.stream.block_stream import BlockStream
from espalier.hf.stream.edits import Edits
from espalier.hf.whole.adapters import merged
from espalier.models.adapters import AdapterPlan, adapter_plan
from espalier.settings.tables.lora import LoraSettings
from tests.hf.tiny_models import (
    CPU,
    VOCABULARY,
    llama_config,
    save_model,
    token_sequences,
    whole_model,
)

SAMPLES = token_sequences(2, 9)
CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": llama_config,
    "opt": lambda: OPTConfig(
        vocab_size=VOCABULARY, hidden_size=32, ffn_dim=48, word_embed_proj_dim=24,
        num_hidden_layers=3, num_attention_heads=4, max_position_embeddings=64, init_std=0.2,
    ),
}  # fmt: skip
PLANS: dict[str, dict[str, Any]] = {
    "all matrices": {"targets": "all"},
    "two of each block": {"targets": "attn.q,attn.v"},
    "some blocks": {"targets": "attn.k,mlp.down", "layers": "0,2"},
    "a limit": {"targets": "all", "rank": 6},
}  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, OpenedModel]:
    """LLaMA with two query heads per group, and OPT with embeddings narrower than its blocks."""
    return {
        name: OpenedModel(save_model(tmp_path_factory.mktemp(f"base-{name}"), config()))
        for name, config in CONFIGS.items()
    }


class Result:
    """Adapters as a run leaves them at its end."""

    def __init__(self, model: OpenedModel, limit: int = 4, scale: float = 0.1, **lora: Any) -> None:
        self.model = model
        self.plan: AdapterPlan = adapter_plan(
            model.plan, LoraSettings(**{"rank": 3, "alpha": 4.0} | lora)
        ).limited(limit)
        generator = torch.Generator().manual_seed(6)
        self.values = {
            key: {
                name: scale * torch.randn(shape, generator=generator)
                for name, shape in block.items()
            }
            for key, block in self.plan.shapes().items()
        }

    def tensors(self, key: str) -> dict[str, Tensor]:
        return self.values[key]

    @property
    def edits(self) -> Edits:
        return merged(self.plan, self.values)

    def export(self, target: Path) -> Path:
        export_adapter(self.model, self.plan, self.tensors, target)
        return target

    def check(self, target: Path, computing: Computing = CPU) -> None:
        check_adapter(BlockStream(self.model, computing), self.edits, target, SAMPLES)


def config_of(target: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((target / "adapter_config.json").read_text())
    return document


# ----- the written files --------------------------------------------------------------------------


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("family", CONFIGS)
@torch.no_grad()
def test_plain_peft_equals_merged_model(
    models: dict[str, OpenedModel], family: str, plan: str, tmp_path: Path, computing: Computing
) -> None:
    result = Result(models[family], **PLANS[plan])
    target = result.export(tmp_path / "adapter")
    export_edited(result.model, result.edits, tmp_path / "model")
    tuned = PeftModel.from_pretrained(whole_model(result.model.directory), str(target)).eval()
    found = tuned(input_ids=SAMPLES).logits
    dense = whole_model(result.model.directory)(input_ids=SAMPLES).logits
    torch.testing.assert_close(
        found, whole_model(tmp_path / "model")(input_ids=SAMPLES).logits, rtol=1e-4, atol=1e-4
    )
    assert (found - dense).abs().max() > 0.01
    result.check(target, computing)


def test_tensors_by_hand(models: dict[str, OpenedModel], tmp_path: Path) -> None:
    result = Result(models["llama"], targets="attn.k", layers="2")
    stored = load_file(result.export(tmp_path / "adapter") / "adapter_model.safetensors")
    path = "base_model.model.model.layers.2.self_attn.k_proj"
    assert set(stored) == {f"{path}.lora_A.weight", f"{path}.lora_B.weight"}
    assert torch.equal(
        stored[f"{path}.lora_A.weight"], result.values["block-0002"]["attn.k.lora_a"]
    )
    assert torch.equal(
        stored[f"{path}.lora_B.weight"], result.values["block-0002"]["attn.k.lora_b"]
    )
    with safe_open(tmp_path / "adapter" / "adapter_model.safetensors", "pt") as opened:
        assert opened.metadata() == {"format": "pt"}


def test_the_description_by_hand(models: dict[str, OpenedModel], tmp_path: Path) -> None:
    config = config_of(
        Result(models["llama"], **PLANS["all matrices"]).export(tmp_path / "adapter")
    )
    wanted = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 3, "lora_alpha": 4, "lora_dropout": 0.0,
        "bias": "none", "inference_mode": True,
        "base_model_name_or_path": str(models["llama"].directory),
        "target_modules": [
            "mlp.down_proj", "mlp.gate_proj", "mlp.up_proj",
            "self_attn.k_proj", "self_attn.o_proj", "self_attn.q_proj", "self_attn.v_proj",
        ],
    }  # fmt: skip
    assert {key: config[key] for key in wanted} == wanted


def test_base_model_is_named_by_its_absolute_path(
    models: dict[str, OpenedModel], tmp_path: Path
) -> None:
    """Only the configuration depends on the machine, and only in the name of the base model."""
    target = Result(models["llama"], targets="all").export(tmp_path / "adapter")
    assert config_of(target)["base_model_name_or_path"] == str(models["llama"].directory)
    for file in target.iterdir():
        content = file.read_bytes().replace(str(models["llama"].directory).encode(), b"")
        assert str(tmp_path).encode() not in content
    assert sorted(file.name for file in target.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]


def test_base_model_in_the_cache_of_the_hub_is_named_by_its_commit(tmp_path: Path) -> None:
    commit = "0a1b" * 10
    model = OpenedModel(
        save_model(tmp_path / "models--o--tiny" / "snapshots" / commit, llama_config())
    )
    config = config_of(Result(model, targets="all").export(tmp_path / "adapter"))
    assert (config["base_model_name_or_path"], config["revision"]) == ("o/tiny", commit)


LOADED_ELSEWHERE = """
import sys, torch
from peft import AutoPeftModelForCausalLM
model = AutoPeftModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
torch.save(model(input_ids=torch.load(sys.argv[2])).logits, "logits.pt")
"""


@torch.no_grad()
def test_adapter_finds_its_base_from_another_directory(
    models: dict[str, OpenedModel], tmp_path: Path
) -> None:
    result = Result(models["llama"], targets="all")
    target = result.export(tmp_path / "adapter")
    export_edited(result.model, result.edits, tmp_path / "model")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    torch.save(SAMPLES, tmp_path / "samples.pt")
    command = [sys.executable, "-c", LOADED_ELSEWHERE, str(target), str(tmp_path / "samples.pt")]
    env = os.environ | {"HF_HUB_OFFLINE": "1"}
    subprocess.run(command, cwd=elsewhere, env=env, check=True, capture_output=True)
    expected = whole_model(tmp_path / "model")(input_ids=SAMPLES).logits
    found = torch.load(elsewhere / "logits.pt")
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_the_same_adapters_give_the_same_bytes(
    models: dict[str, OpenedModel], tmp_path: Path
) -> None:
    """Lists are sorted: peft holds some as sets, whose order differs between processes."""
    one, other = (
        Result(models["llama"], targets="all", layers="0,2").export(tmp_path / name)
        for name in ("one", "other")
    )
    for file in one.iterdir():
        assert file.read_bytes() == (other / file.name).read_bytes()
    assert len(config_of(one)["target_modules"]) == 14
    assert config_of(one)["target_modules"] == sorted(config_of(one)["target_modules"])
    assert list(config_of(one)) == sorted(config_of(one))


def test_older_adapter_is_replaced_whole(models: dict[str, OpenedModel], tmp_path: Path) -> None:
    target = tmp_path / "adapter"
    unfinished = tmp_path / ".adapter.unfinished"
    for folder in (target, unfinished):
        folder.mkdir()
        (folder / "leftover").write_text("old")
    result = Result(models["opt"])
    result.check(result.export(target))
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]
    assert not (target / "leftover").exists()


def test_a_full_disk_leaves_no_adapter(
    models: dict[str, OpenedModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(EspalierError, match=r"cannot write .*adapter.*: No space left on device"):
        Result(models["llama"]).export(tmp_path / "adapter")
    assert not (tmp_path / "adapter").exists()


# ----- the check ----------------------------------------------------------------------------------


def damaged(target: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    file = target / "adapter_model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, {"format": "pt"})


def _one_number(tensors: dict[str, Tensor]) -> None:
    tensors["base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"][1, 3] += 0.01


def _two_exchanged(tensors: dict[str, Tensor]) -> None:
    one, other = (
        f"base_model.model.model.layers.{index}.self_attn.q_proj.lora_B.weight" for index in (0, 2)
    )
    tensors[one], tensors[other] = tensors[other], tensors[one]


def _one_missing(tensors: dict[str, Tensor]) -> None:
    del tensors["base_model.model.model.layers.0.self_attn.v_proj.lora_B.weight"]


def _not_a_number(tensors: dict[str, Tensor]) -> None:
    tensors["base_model.model.model.layers.0.self_attn.v_proj.lora_B.weight"][0, 0] = float("nan")


@pytest.mark.parametrize("scale", [0.1, 1e-4])
@pytest.mark.parametrize("change", [_one_number, _two_exchanged, _one_missing, _not_a_number])
@pytest.mark.filterwarnings("ignore:Found missing adapter keys")
def test_damaged_tensors_fail_the_check(
    models: dict[str, OpenedModel], change: Any, scale: float, tmp_path: Path
) -> None:
    """Covers updates so small that the logits do not show the damage."""
    result = Result(models["llama"], scale=scale)
    damaged(result.export(tmp_path / "adapter"), change)
    with pytest.raises(
        ExportError,
        match=r"adapter: the update of attn.[qv] of block [012] is not the one that was trained",
    ):
        result.check(tmp_path / "adapter")


@pytest.mark.parametrize("keep", [0, 100, -1])
def test_a_file_that_was_cut_fails_the_check(
    models: dict[str, OpenedModel], keep: int, tmp_path: Path
) -> None:
    result = Result(models["llama"])
    file = result.export(tmp_path / "adapter") / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ExportError, match=r"adapter: peft cannot load it \(SafetensorError\)"):
        result.check(tmp_path / "adapter")


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("lora_alpha", 8, "the update of attn.q of block 0"),
        ("r", 4, r"peft cannot load it \(RuntimeError\)"),
        (
            "target_modules",
            ["self_attn.q_proj"],
            "attn.v of block 0 is adapted in only one of file and result",
        ),
        (
            "target_modules",
            ["q_proj", "v_proj", "down_proj"],
            "mlp.down of block 0 is adapted in only one of file and result",
        ),
        ("use_rslora", True, "the update of attn.q of block 0"),
    ],
)
@pytest.mark.filterwarnings("ignore:Found missing adapter keys")
def test_a_damaged_description_fails_the_check(
    models: dict[str, OpenedModel], key: str, value: Any, words: str, tmp_path: Path
) -> None:
    result = Result(models["llama"])
    target = result.export(tmp_path / "adapter")
    (target / "adapter_config.json").write_text(json.dumps(config_of(target) | {key: value}))
    with pytest.raises(ExportError, match=words):
        result.check(target)


def test_logits_are_compared_too(
    models: dict[str, OpenedModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = Result(models["llama"])
    target = result.export(tmp_path / "adapter")
    monkeypatch.setattr(exporting, "logits_of", lambda *_: iter([torch.zeros(18, VOCABULARY)]))
    with pytest.raises(ExportError, match="logits of the reloaded model differ"):
        result.check(target)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_in_bfloat16_passes(dtype: torch.dtype, tmp_path: Path) -> None:
    """Merged weights are rounded to bfloat16; unmerged adapters are not."""
    model = OpenedModel(save_model(tmp_path / "base", llama_config(), dtype=torch.bfloat16))
    result = Result(model, targets="all")
    result.check(result.export(tmp_path / "adapter"), Computing(torch.device("cpu"), dtype, 1))


@pytest.mark.parametrize("scale", [0.5, 2.0])
def test_large_bfloat16_updates_pass_check(scale: float, tmp_path: Path) -> None:
    """The rounding of merged weights is not reported as damage, however large the update is."""
    model = OpenedModel(save_model(tmp_path / "base", llama_config(), dtype=torch.bfloat16))
    result = Result(model, targets="all", scale=scale)
    result.check(result.export(tmp_path / "adapter"))


def test_adapters_that_have_learnt_nothing_pass(
    models: dict[str, OpenedModel], tmp_path: Path
) -> None:
    result = Result(models["llama"])
    for block in result.values.values():
        block["attn.q.lora_b"].zero_()
    result.check(result.export(tmp_path / "adapter"))


def test_no_library_warns_a_user(models: dict[str, OpenedModel], tmp_path: Path) -> None:
    """Run in a process of its own, as in a Flower simulation, with deprecation warnings as errors.

    Python shows each warning only once per process.
    """
    result = Result(models["llama"])
    result.export(tmp_path / "adapter")
    program = f"""
import warnings
import flwr.simulation, transformers  # what these say while they are imported is not seen in a run
warnings.simplefilter("error", DeprecationWarning)
warnings.simplefilter("error", FutureWarning)
from espalier.hf.export.adapter import in_peft
from transformers import AutoModelForCausalLM
in_peft(AutoModelForCausalLM.from_pretrained({str(result.model.directory)!r}), \
{str(tmp_path / "adapter")!r})
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert (done.returncode, "arn" in done.stderr) == (0, False), done.stderr
