"""Runs on families with other blocks than LLaMA; plain transformers and peft load what they write.

A run compares its result with plain transformers itself, and fails if logits differ.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from espalier.errors import InputError
from espalier.hf.opening.opened_model import OpenedModel
from espalier.settings.run import parse
from server_app.estimate.command import planned
from server_app.estimate.estimate import Speeds
from tests.bench import Bench, Home, home, private_text, summary
from tests.hf.tiny_models import random_model, tiny_config

TUNED = {
    "federation.rounds": 1,
    "training.steps": 2,
    "training.batch-size": 2,
    "training.learning-rate": 0.01,
    "lora.rank": 4,
    "lora.targets": "all",
}
SETTINGS: dict[str, dict[str, Any]] = {
    "fedpetuning": TUNED | {"lora.merge": True},
    "hetlora": TUNED | {"lora.ranks": "2,4"},
    "fedspine": TUNED
    | {"federation.rounds": 2, "pruning.keep-models": False, "fedspine.allocation": "random"},
    "sft-p": TUNED | {"sft-p.embedding": 8, "sft-p.code": 4, "pruning.keep-models": False},
    "fedprllm": {},
    "fedspallm": {},
    "flap": {},
    "pooled-pruning": {},
    "llm-pruner": {"llm-pruner.spare-first": 0, "llm-pruner.spare-last": 0},
    "llm-streamline": {
        "pruning.ratio": 0.5,
        "llm-streamline.steps": 2,
        # More than a client has samples.
        "llm-streamline.batch-size": 3,
    },
    "slicegpt": {"slicegpt.multiple": 4},
}
SHORT = {"data.sequence-length": 32, "evaluation.sequence-length": 32}
DENSE = ("granite", "smollm3", "phi3", "gemma2", "gemma3_text")
CASES = [
    *((kind, method) for kind in DENSE for method in SETTINGS if method != "slicegpt"),
    *((kind, "slicegpt") for kind in DENSE[:3]),
    *(
        ("olmo2", method)
        for method in ("fedpetuning", "fedprllm", "fedspallm", "llm-streamline", "pooled-pruning")
    ),
    *((kind, method) for kind in ("mixtral", "qwen3_moe") for method in ("fedpetuning", "hetlora")),
]


@pytest.fixture(scope="module")
def homes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Home]:
    """Return a model of each family with the tokenizer and the evaluation text of all benches."""
    shared = home(tmp_path_factory.mktemp("home"))
    found = {}
    for kind in {kind for kind, _ in CASES}:
        folder = tmp_path_factory.mktemp(kind)
        random_model(tiny_config(kind, vocab_size=300, num_hidden_layers=4)).save_pretrained(folder)
        for file in shared.model.glob("token*"):
            (folder / file.name).write_bytes(file.read_bytes())
        found[kind] = Home(folder, shared.public)
    return found


@pytest.mark.parametrize(("kind", "method"), CASES)
def test_a_run_ends_with_a_checked_result(
    homes: dict[str, Home], tmp_path: Path, kind: str, method: str
) -> None:
    bench = Bench(tmp_path, method, SETTINGS[method], num_clients=2, home=homes[kind])
    assert summary(bench.run())["status"] == "completed"


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "phi3"])
def test_peft_loads_the_adapter_and_transformers_the_merged_model(
    homes: dict[str, Home], tmp_path: Path, kind: str
) -> None:
    settings = SETTINGS["fedpetuning"]
    folder = Bench(tmp_path, "fedpetuning", settings, num_clients=2, home=homes[kind]).run()
    base = AutoModelForCausalLM.from_pretrained(homes[kind].model).eval()
    whole = AutoModelForCausalLM.from_pretrained(folder / "model").eval()
    tokens = torch.arange(4, 20).view(2, 8)
    with torch.no_grad():
        dense = base(input_ids=tokens).logits
        merged = whole(input_ids=tokens).logits
        tuned = PeftModel.from_pretrained(base, folder / "adapter").eval()(input_ids=tokens).logits
    torch.testing.assert_close(merged, tuned, rtol=1e-4, atol=1e-4)
    assert (tuned - dense).abs().max() > 1e-3
    files = [
        OpenedModel(one).checkpoint.as_written for one in (homes[kind].model, folder / "model")
    ]
    assert files[0].tensors.keys() == files[1].tensors.keys()


def test_experts_are_not_pruned(homes: dict[str, Home], tmp_path: Path) -> None:
    bench = Bench(tmp_path, "fedprllm", {}, num_clients=2, home=homes["mixtral"])
    with pytest.raises(InputError, match="only attention can be tuned so far; set method to"):
        bench.run()
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_a_run_with_experts_is_estimated(homes: dict[str, Home], kind: str) -> None:
    settings = parse({"method": "fedpetuning", "lora.targets": "all"} | SHORT)
    assert "memory" in planned(settings, OpenedModel(homes[kind].model)).long(Speeds())


@pytest.mark.parametrize(
    "kind",
    [
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("granite", "smollm3", "phi3")),
        "gemma2",
    ],
)
def test_a_sub_model_keeps_the_types_of_its_blocks(
    homes: dict[str, Home], tmp_path: Path, kind: str
) -> None:
    """FedSODA writes the sub-model in plain form and aligns its logits with the model's."""
    settings = TUNED | {
        "training.base": "float32",
        "fedsoda.emulator": "stored",
        "fedsoda.adapter-layers": 1,
        "fedsoda.group-layers": 1,
        "fedsoda.groups": 1,
        "fedsoda.pre-align-steps": 2,
        "public.samples": 4,
        "public.text": str(tmp_path / "align.txt"),
    }
    (tmp_path / "align.txt").write_text(private_text(98))
    bench = Bench(tmp_path, "fedsoda", settings, num_clients=2, home=homes[kind])
    assert summary(bench.run())["status"] == "completed"
