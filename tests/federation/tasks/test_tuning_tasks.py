"""Tuning on the items of a task.

Decoders have options and written answers, encoders a classification head.

"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForSequenceClassification, PeftModel
from safetensors.torch import load, load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from espalier.cli.command import main
from espalier.messages.records import read
from tests.bench import Bench, model_files, summary
from tests.federation.tasks.task_runs import NOT_COMPARED, bench_of, instructions, metric, reviews
from tests.tiny_model import save_tiny_llama, save_tiny_roberta


def test_a_decoder_on_options(folder: Path) -> None:
    bench = bench_of(folder, "sst2", reviews)
    document = summary(bench.run())
    assert {entry["name"] for entry in document["metrics"]} == {
        "perplexity",
        "acc",
        "acc_norm",
        "loss",
    }
    loss = metric(document, "loss")
    accuracy = metric(document, "acc")
    assert loss["values"]["federated"] < loss["values"]["dense"]
    assert loss["values"]["centralized"] < loss["values"]["dense"]
    assert loss["values"]["local_baseline"] < loss["values"]["dense"]
    labels = [record["label"] for record in reviews(99)]
    assert accuracy["chance"] == pytest.approx(max(sum(labels), 60 - sum(labels)) / 60)


AVERAGED = {
    "fedpetuning fedex": {"fedpetuning.aggregation": "fedex"},
    "fedpetuning ffa": {"fedpetuning.aggregation": "ffa"},
    "hetlora svd": {"lora.ranks": "1,2", "hetlora.aggregation": "svd"},
    "flora": {"lora.ranks": "1,2"},
    "fed-sb": {},
}
"""Ways to average adapters whose results have other ranks or tensors than what was trained."""


@pytest.mark.parametrize("kind", ["decoder", "encoder"])
@pytest.mark.parametrize("name", AVERAGED)
def test_all_models_are_scored(folder: Path, kind: str, name: str) -> None:
    bench = bench_of(folder, "sst2", reviews, **AVERAGED[name], **{"task.max-test-items": 12})
    bench.method = name.split()[0]
    if kind == "encoder":
        bench.model = save_tiny_roberta(folder / "encoder")
    values = metric(summary(bench.run()), "loss")["values"]
    assert set(values) == {"dense", "local_baseline", "centralized", "federated"}
    # All were trained, so none equals another one.
    assert len(set(values.values())) == 4


def test_a_decoder_on_written_answers_of_its_own(folder: Path) -> None:
    """The federated loss on the evaluation items is that of plain peft.

    Clients also evaluate their own held-out items.
    """
    bench = bench_of(
        folder, "dolly", instructions, **{"evaluation.own-text": True, "task.max-tokens": 400}
    )
    bench.model = save_tiny_llama(folder / "longer", positions=400)
    run = bench.run()
    document = summary(run)
    base = AutoModelForCausalLM.from_pretrained(bench.model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(bench.model)
    tuned = PeftModel.from_pretrained(base, run / "adapter").eval()
    total = 0.0
    count = 0
    for record in instructions(99):
        prompt = (
            "Below is an instruction that describes a task. Write a response that appropriately"
            f" completes the request.\n\n### Instruction:\n{record['instruction']}\n\n###"
            " Response:\n"
        )
        context = len(tokenizer(prompt.rstrip())["input_ids"])
        tokens = torch.tensor(tokenizer(prompt + record["response"])["input_ids"])
        with torch.no_grad():
            logits = tuned(input_ids=tokens[None]).logits[0].log_softmax(-1)
        total -= sum(
            float(logits[place - 1, tokens[place]]) for place in range(context, len(tokens))
        )
        count += len(tokens) - context
    assert metric(document, "loss")["values"]["federated"] == pytest.approx(total / count, rel=1e-3)
    (own,) = [entry for entry in document["metrics"] if entry["dataset"] == "own-text"]
    assert own["values"]["federated"] < own["values"]["dense"]
    assert own["values"]["local_baseline"] < own["values"]["dense"]
    assert {client["status"] for client in document["clients"]} == {"completed"}


def test_encoder_learns_and_its_head_is_averaged(encoder: Bench) -> None:
    grid = encoder.grid(training__steps=12, evaluation__every=2)
    run = encoder.run(grid, training__steps=12, evaluation__every=2)
    document, (look,) = summary(run), json.loads((run / "rounds.json").read_text())["rounds"]
    accuracy = metric(document, "acc")
    assert look == {
        "round": 2,
        "scores": {name: metric(document, name)["values"]["federated"] for name in look["scores"]},
    }
    assert accuracy["values"]["federated"] > accuracy["chance"] + 0.2
    heads: dict[int, dict[str, torch.Tensor]] = {}
    for _, reply in grid.received:
        body = read(reply.content)
        if body.header.server_round == 2 and "head" in body.blobs:
            heads[body.header.client] = load(body.blobs["head"])
    samples = [client["metrics"]["samples"] for client in document["clients"]]
    expected = sum(
        heads[client]["head.out.weight"].double() * number for client, number in enumerate(samples)
    ) / sum(samples)
    written = load_file(run / "adapter" / "adapter_model.safetensors")
    (name,) = [name for name in written if "out_proj" in name and name.endswith("weight")]
    assert torch.equal(written[name], expected.float())

    base = AutoModelForSequenceClassification.from_pretrained(encoder.model, num_labels=2)
    tuned = PeftModel.from_pretrained(base, run / "adapter").eval()
    tokenizer = AutoTokenizer.from_pretrained(encoder.model)
    right = 0
    for record in reviews(99):
        with torch.no_grad():
            right += (
                int(tuned(**tokenizer(record["sentence"], return_tensors="pt")).logits.argmax())
                == record["label"]
            )
    assert accuracy["values"]["federated"] == pytest.approx(right / 60)


def test_an_encoder_is_merged_too(encoder: Bench) -> None:
    """Plain transformers loads the merged model with its classes and tokenizer.

    Its logits are those of the adapter in peft.
    """
    run = encoder.run(lora__merge=True, federation__rounds=1, **NOT_COMPARED)
    merged = AutoModelForSequenceClassification.from_pretrained(run / "model").eval()
    base = AutoModelForSequenceClassification.from_pretrained(encoder.model, num_labels=2)
    tuned = PeftModel.from_pretrained(base, run / "adapter").eval()
    rows = AutoTokenizer.from_pretrained(run / "model")(
        reviews(99)[0]["sentence"], return_tensors="pt"
    )
    with torch.no_grad():
        assert torch.allclose(merged(**rows).logits, tuned(**rows).logits, atol=1e-5)
    assert merged.config.id2label == {0: "negative", 1: "positive"}
    assert (
        type(merged).__name__
        == merged.config.architectures[0]
        == "RobertaForSequenceClassification"
    )


def test_an_encoder_s_adapter_is_exported_as_the_run_merges_it(
    encoder: Bench, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = encoder.run(lora__merge=True, federation__rounds=1, **NOT_COMPARED)
    (run / "model").rename(tmp_path / "expected")
    assert main(["export", str(run), "--to", "transformers", "--out", str(tmp_path / "out")]) == 0
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "expected" / name).read_bytes()
    adapter = str(tmp_path / "adapter")
    words = ["export", str(run), "--to", "transformers", "--adapter", "--out", adapter]
    assert main(words) == 0
    lines = (tmp_path / "adapter" / "README.md").read_text()
    call = "AutoPeftModelForSequenceClassification.from_pretrained({}, num_labels=2)"
    assert call.format('"this directory"') in lines
    found = AutoPeftModelForSequenceClassification.from_pretrained(adapter, num_labels=2)
    assert found.base_model.classifier is not None
    capfd.readouterr()
    assert main(["export", str(run), "--to", "gguf", "--out", str(tmp_path / "gguf")]) == 2
    assert "GGUF" in capfd.readouterr().err


def test_an_encoder_s_run_repeats(encoder: Bench) -> None:
    assert model_files(encoder.run(**NOT_COMPARED)) == model_files(encoder.run(**NOT_COMPARED))


def conversations(client: int, number: int = 40) -> list[dict[str, Any]]:
    found = []
    for record in instructions(client, number):
        rows = [
            {"role": "user", "content": record["category"]},
            {"role": "assistant", "content": record["response"]},
        ]
        found.append({"messages": rows * (1 + len(found) % 2)})
    return found


@pytest.mark.parametrize("packing", [False, True])
def test_conversations(folder: Path, packing: bool) -> None:
    """The adapter and the merged model keep the tokenizer with the chat template."""
    settings = {"task.chat-template": "chatml", "task.max-tokens": 64, "task.packing": packing}
    bench = bench_of(folder, "chat", conversations, **settings, **{"lora.merge": True})
    run = bench.run()
    loss = metric(summary(run), "loss")
    assert loss["values"]["federated"] < loss["values"]["dense"]
    assert loss["values"]["centralized"] < loss["values"]["dense"]
    for name in ("adapter", "model"):
        tokenizer = AutoTokenizer.from_pretrained(run / name)
        text = tokenizer.apply_chat_template([{"role": "user", "content": "oak"}], tokenize=False)
        assert text == "<|im_start|>user\noak<|im_end|>\n"
    assert not (run / "adapter" / "config.json").exists()


def test_the_template_of_the_base_model_is_kept(folder: Path) -> None:
    bench = bench_of(folder, "chat", conversations)
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}" + (
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    (folder / "base" / "chat_template.jinja").write_text(template)
    run = bench.run(**NOT_COMPARED)
    tokenizer = AutoTokenizer.from_pretrained(run / "adapter")
    assert tokenizer.chat_template == template


def test_a_prompt_of_ones_own(folder: Path) -> None:
    settings = {"data.prompt": "{instruction} =>", "data.columns": "answer=response"}
    bench = bench_of(folder, "completion", instructions, **settings)
    loss = metric(summary(bench.run(**NOT_COMPARED)), "loss")
    assert loss["values"]["federated"] < loss["values"]["dense"]


def test_labels_of_ones_own(folder: Path) -> None:
    settings = {"data.prompt": "{sentence} ?", "data.labels": "soft,hard"}
    bench = bench_of(folder, "classification", reviews, **settings)
    document = summary(bench.run(**NOT_COMPARED))
    assert metric(document, "acc")["chance"] >= 0.5
    loss = metric(document, "loss")
    assert loss["values"]["federated"] < loss["values"]["dense"]
