"""Model cards: front matter that the Hugging Face Hub reads, and no local paths."""

from pathlib import Path
from typing import Any, get_args

import pytest
from huggingface_hub import ModelCard

from espalier.hf.opening.opened_model import OpenedModel
from espalier.settings.registry import METHODS
from espalier.settings.run import parse
from espalier.settings.tables.data import DataSettings
from server_app.report.model_card import SOURCES, adapter_card, merged_card, pruned_card
from tests.bench import EVALUATED, Bench, summary
from tests.tiny_model import save_tiny_llama

REPORT = {"ranks": [2, 8], "trained_parameters": 12345}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> OpenedModel:
    return OpenedModel(save_tiny_llama(tmp_path_factory.mktemp("hospital-x") / "tiny-llama"))


def row(card: str, name: str) -> str:
    (line,) = [line for line in card.splitlines() if line.startswith(f"| {name} |")]
    return line.removeprefix(f"| {name} | ").removesuffix(" |")


def front_matter(card: str) -> dict[str, Any]:
    """Return the front matter as huggingface_hub reads it."""
    found: dict[str, Any] = ModelCard(card).data.to_dict()
    return found


def test_a_card_of_private_sums_says_that_all_records_count(model: OpenedModel) -> None:
    private = {"method": "pooled-pruning", "privacy.epsilon": 4.0}
    private |= {"evaluation.local-baseline": False, "evaluation.centralized": "off"}
    card = pruned_card(parse(private), model, 0.5)
    assert row(card, "data").startswith("all records, each of at most 256 tokens for each client")
    settings = card[card.index("```toml") :]
    assert "num-samples" not in settings
    assert "weighting" not in settings
    assert "clip-norm" not in settings
    assert "epsilon = 4.0" in settings


def test_a_pruned_model_s_card(model: OpenedModel) -> None:
    card = pruned_card(
        parse({"method": "fedprllm", "pruning.sparsity": 0.6, "num-clients": 3, "seed": 5}),
        model,
        0.599951,
    )
    assert front_matter(card) == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["espalier", "federated-learning", "pruning", "fedprllm"],
    }
    assert "# tiny-llama, pruned\n" in card
    assert (
        row(card, "base model")
        == f"`tiny-llama`; SHA-256 of its weights and tokenizer: `{model.sha256}`"
    )
    assert row(card, "method").startswith("FedPrLLM ")
    assert row(card, "sparsity").startswith(
        "60.00% of the weights of the decoder blocks' linear layers"
    )
    assert row(card, "clients").startswith("3 requested")
    assert row(card, "data").startswith(
        "8 samples of 256 tokens for each client, from the documentation of Python"
    )
    assert row(card, "versions").startswith("espalier 0.1.0, python 3.")
    assert "\nseed = 5\n" in card
    assert "\n[pruning]\nsparsity = 0.6\n" in card
    assert "[lora]" not in card


def test_cards_of_adapters_and_of_a_merged_model(model: OpenedModel) -> None:
    settings = parse({"method": "hetlora", "lora.ranks": "2,8"})
    card = adapter_card(settings, model, REPORT)
    merged = merged_card(settings, model, REPORT)
    assert front_matter(card)["library_name"] == "peft"
    assert front_matter(merged)["library_name"] == "transformers"
    assert {*front_matter(card)["tags"]} >= {"lora", "hetlora"}
    for text in (card, merged):
        assert row(text, "adapters") == "LoRA of rank 2, 8; 12,345 trained parameters"
        assert "[hetlora]" in text
    assert "AutoPeftModelForCausalLM.from_pretrained(" in card
    assert ", peft 0." in row(card, "versions")
    assert "Peft" not in merged


def test_base_model_with_owner_is_named(tmp_path: Path) -> None:
    model = OpenedModel(
        save_tiny_llama(tmp_path / "models--owner--tiny.llama" / "snapshots" / "0a1b")
    )
    card = pruned_card(parse({}), model, 0.5)
    assert front_matter(card)["base_model"] == "owner/tiny.llama"
    assert "# owner/tiny.llama, pruned\n" in card


def test_a_name_cannot_break_the_card(tmp_path: Path) -> None:
    model = OpenedModel(save_tiny_llama(tmp_path / "a`b|c\n---\nlicense: mit"))
    card = pruned_card(parse({}), model, 0.5)
    assert "license" not in front_matter(card)
    assert row(card, "base model").startswith("`a_b_c_---_license_ mit`; ")


def test_every_method_and_source_has_words() -> None:
    assert all(row.title for row in METHODS.values())
    assert SOURCES.keys() | {"auto"} == set(
        get_args(DataSettings.model_fields["source"].annotation)
    )


@pytest.mark.parametrize("method", ["fedprllm", "fedpetuning"])
def test_paths_stay_out_of_it(model: OpenedModel, method: str) -> None:
    settings = parse(
        {
            "method": method, "model": str(model.directory), "data.source": "files",
            "data.path": "/secret/{client}.jsonl", "task.test-path": "/secret/tests.jsonl",
            "evaluation.texts": "ours=/secret/public.txt", "out-dir": "/secret/runs",
            "resume-from": "/secret/runs/1",
            **({"task.name": "sst2"} if method == "fedpetuning" else {}),
        }
    )  # fmt: skip
    for card in (pruned_card(settings, model, 0.5), adapter_card(settings, model, REPORT)):
        assert "secret" not in card
        assert str(model.directory.parent) not in card
        assert "the run's own files" in row(card, "data")
    assert ("items of the task `sst2`" in row(card, "data")) == (method == "fedpetuning")


@pytest.mark.parametrize(
    ("path", "named"),
    [
        ("owner/stories", "the dataset `owner/stories` of the Hugging Face hub"),
        ("/secret/stories", "a dataset of the Hugging Face hub"),
    ],
)
def test_hub_dataset_is_named_but_no_directory(model: OpenedModel, path: str, named: str) -> None:
    card = pruned_card(parse({"data.source": "hub", "data.path": path}), model, 0.5)
    assert f"from {named} (" in row(card, "data")
    assert "secret" not in card


@pytest.mark.parametrize("method", ["fedprllm", "fedpetuning"])
def test_a_run_writes_its_cards(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ESPALIER_STATE_DIR", str(tmp_path / "state"))
    settings = (
        {"federation.rounds": 1, "training.steps": 1, "lora.merge": True}
        if method == "fedpetuning"
        else {}
    )
    bench = Bench(
        tmp_path, method, {**EVALUATED, **settings, "evaluation.own-text": False}, num_clients=2
    )
    folder = bench.run()
    document = summary(folder)
    tuned = method == "fedpetuning"
    cards = {path.parent.name: path.read_text() for path in folder.glob("*/README.md")}
    assert sorted(cards) == (["adapter", "model"] if tuned else ["model"])
    for card in cards.values():
        assert document["model_sha256"] in row(card, "base model")
        assert str(tmp_path) not in card
        assert all(
            f"{name} {number}" in row(card, "versions")
            for name, number in document["versions"].items()
        )
    if not tuned:
        assert row(cards["model"], "sparsity").startswith(
            f"{document['sparsity']['achieved']:.2%} "
        )
    again = bench.run()
    assert {path.parent.name: path.read_text() for path in again.glob("*/README.md")} == cards
