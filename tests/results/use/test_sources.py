"""Models that a run directory offers, and how they are loaded."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

import espalier
from espalier.errors import InputError
from espalier.results.finished_run import open_run
from espalier.results.sources import (
    Source,
    base_model_of,
    require_text_model,
    result_of,
    sources_of,
)
from espalier.results.use.loading import device_named, load_model
from tests.bench import Bench
from tests.results.use.saved_run import save_run
from tests.tiny_model import save_tiny_llama, save_tiny_roberta


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return save_tiny_llama(tmp_path / "base", dtype=torch.float32)


@pytest.fixture
def tuned(tmp_path: Path, base: Path) -> Path:
    """Run whose result is an adapter with random factors."""
    run = save_run(tmp_path / "run", str(base))
    torch.manual_seed(1)
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base),
        LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False),
    )
    model.save_pretrained(run / "adapter")
    return run


IDS = torch.tensor([[3, 5, 8, 13]])


@torch.no_grad()
def test_adapter_is_loaded_over_its_base(tuned: Path, base: Path) -> None:
    """The logits are those of factors that are multiplied and added by hand."""
    result = espalier.load_result(tuned)
    adapted = result.adapter()
    dense = AutoModelForCausalLM.from_pretrained(base)
    for name, module in adapted.named_modules():
        if hasattr(module, "lora_A"):
            a = module.lora_A["default"].weight
            b = module.lora_B["default"].weight
            place = name.removeprefix("base_model.model.")
            dense.get_submodule(place).weight += module.scaling["default"] * b @ a
    torch.testing.assert_close(result.model()(IDS).logits, dense(IDS).logits)
    torch.testing.assert_close(adapted(IDS).logits, dense(IDS).logits)
    assert not adapted.training


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"r": "x"}, "r = 'x': "),
        ({"r": 0}, "r = 0: "),
        ({"lora_alpha": None}, "lora_alpha = None: "),
        ({"target_modules": 7}, r"target_modules\.\S+ = 7: "),
        ({"peft_type": ["a"]}, r"peft_type = \['a'\]: "),
    ],
)
def test_a_damaged_adapter_is_named(tuned: Path, change: dict[str, Any], place: str) -> None:
    path = tuned / "adapter" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    source = result_of(open_run(tuned))
    for use in (lambda: load_model(source, "cpu"), lambda: source.adapted):
        with pytest.raises(InputError, match=rf"adapter_config\.json: {place}"):
            use()


def test_a_damaged_generation_config_is_named(base: Path) -> None:
    path = base / "generation_config.json"
    path.write_text(json.dumps({"max_new_tokens": "x"}))
    with pytest.raises(InputError, match=r"generation_config\.json: max_new_tokens = 'x': "):
        load_model(Source("result", base), "cpu")


def test_a_damaged_config_is_an_error(base: Path) -> None:
    path = base / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"hidden_act": ["silu"]}))
    with pytest.raises(InputError, match="base: cannot be loaded"):
        load_model(Source("result", base), "cpu")


def test_a_moved_base_can_be_named(tuned: Path, base: Path, tmp_path: Path) -> None:
    moved = base.rename(tmp_path / "moved")
    with pytest.raises(InputError, match=r"its base model cannot be opened: .*--base"):
        result_of(open_run(tuned))
    assert result_of(open_run(tuned), str(moved)).directory == moved
    assert espalier.load_result(tuned).adapter(base=str(moved)) is not None


def test_a_named_base_must_be_the_recorded_one(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "fedpetuning", {"training.steps": 1, "federation.rounds": 1})
    run = open_run(bench.run())
    other = save_tiny_llama(tmp_path / "other", seed=7)
    with pytest.raises(InputError, match=r"does not have the hash that .* recorded"):
        result_of(run, str(other))


def test_a_chain_begins_with_the_original_model(
    tmp_path: Path, base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = save_run(tmp_path / "first", str(base))
    (first / "run.json").write_text("{}")
    save_tiny_llama(first / "model", seed=4)
    second = save_run(tmp_path / "second", str(first / "model"))
    summary = json.loads((second / "summary.json").read_text())
    (second / "summary.json").write_text(json.dumps(summary | {"base": [{"run": str(first)}]}))
    save_tiny_llama(second / "model", seed=5)
    found = sources_of(open_run(second), [], with_base=True)
    assert [(source.name, source.directory) for source in found] == [
        ("original", base),
        ("base", first / "model"),
        ("result", second / "model"),
    ]
    base.rename(tmp_path / "moved")
    found = sources_of(open_run(second), [], with_base=True)
    assert [source.name for source in found] == ["base", "result"]
    assert "without the original model" in capsys.readouterr().err


@torch.no_grad()
def test_model_of_a_client_by_number_or_name(tmp_path: Path, base: Path) -> None:
    path = save_run(tmp_path / "run", str(base))
    for seed, name in enumerate(["clinic-a", "clinic-b"], 1):
        save_tiny_llama(path / "clients" / name, seed=seed, dtype=torch.float32)
    run = open_run(path)
    assert [source.name for source in sources_of(run, [], with_base=True)] == [
        "base",
        "clinic-a",
        "clinic-b",
    ]
    assert [source.name for source in sources_of(run, ["0"], with_base=False)] == ["clinic-b"]
    with pytest.raises(InputError, match=r"no model of client '7'; it has models of clinic-a, cl"):
        sources_of(run, ["7"], with_base=False)
    with pytest.raises(
        InputError, match=r"each client has its own model; .* --client .*: clinic-a"
    ):
        result_of(run)
    expected = AutoModelForCausalLM.from_pretrained(path / "clients" / "clinic-a")
    result = espalier.load_result(path)
    torch.testing.assert_close(result.model("1")(IDS).logits, expected(IDS).logits)
    assert result.clients == ("clinic-a", "clinic-b")
    assert result.tokenizer("1")("oak")["input_ids"]
    with pytest.raises(InputError, match="has no adapter/"):
        result.adapter()


def test_a_run_without_result_is_refused(tmp_path: Path, base: Path) -> None:
    run = open_run(save_run(tmp_path / "run", str(base)))
    with pytest.raises(InputError, match=r"has neither model/config.json nor adapter/"):
        result_of(run)
    with pytest.raises(InputError, match="has no models of single clients"):
        sources_of(run, ["0"], with_base=False)


def test_directories_elsewhere_are_explained(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no such directory on this machine"):
        espalier.load_result(tmp_path / "elsewhere")
    with pytest.raises(InputError, match="is not a run directory"):
        espalier.load_result(tmp_path)


def test_an_encoder_writes_no_text(tmp_path: Path) -> None:
    run = open_run(save_run(tmp_path / "run", str(save_tiny_roberta(tmp_path / "base"))))
    with pytest.raises(InputError, match="is an encoder"):
        require_text_model(base_model_of(run))


def test_devices(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert device_named("auto") == torch.device("cpu")
    with pytest.raises(InputError, match="no CUDA device"):
        device_named("cuda")
    run = open_run(save_run(tmp_path / "run", str(base)))
    with pytest.raises(InputError, match="choose auto, cpu or cuda"):
        load_model(base_model_of(run), "tpu")


def test_a_base_that_nobody_needs_is_refused(tmp_path: Path, base: Path) -> None:
    run = save_run(tmp_path / "run", str(base))
    shutil.copytree(base, run / "model")
    with pytest.raises(InputError, match=r"base = elsewhere: the result of .* is a whole model"):
        espalier.load_result(run).model(base="elsewhere")


def test_an_interrupted_run_is_not_called_running(tmp_path: Path, base: Path) -> None:
    path = save_run(tmp_path / "run", str(base))
    summary = json.loads((path / "summary.json").read_text()) | {"status": "running"}
    (path / "summary.json").write_text(json.dumps(summary))
    with pytest.raises(InputError, match="its status is 'interrupted'"):
        result_of(open_run(path))
