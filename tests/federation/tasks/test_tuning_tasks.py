"""Tuning on the items of a task.

Decoders have options and written answers, encoders a classification head.
"""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load, load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from espalier.errors import EspalierError
from espalier.messages.records import read
from strategies.base.rounds import RunFailed
from tests.bench import EVALUATED, Bench, model_files, summary
from tests.tiny_model import WORDS, save_tiny_llama, save_tiny_roberta

TUNING = {
    "federation.rounds": 2,
    "training.steps": 3,
    "training.batch-size": 4,
    "training.learning-rate": 0.02,
    "lora.rank": 2,
    "task.max-tokens": 40,
    "data.source": "files",
    "evaluation.own-text": False,
}

NOT_COMPARED = {"evaluation__local_baseline": False, "evaluation__centralized": "off"}
"""Settings without local and centralized baselines, for tests that do not read them."""


def reviews(client: int, number: int = 60) -> list[dict[str, Any]]:
    """Return records of sentences whose first word determines the class."""
    generator = random.Random(f"review {client}")
    records = []
    for _ in range(number):
        label = generator.randrange(2)
        words = generator.choices(WORDS, k=5)
        records.append(
            {
                "sentence": " ".join(
                    ["oak" if label else "fir", *words, str(generator.randrange(1000))]
                ),
                "label": label,
            }
        )
    return records


def instructions(client: int, number: int = 40) -> list[dict[str, Any]]:
    generator = random.Random(f"instruction {client}")
    return [
        {
            "instruction": " ".join(generator.choices(WORDS, k=4)),
            "context": "",
            "response": " ".join(generator.choices(WORDS, k=3)),
            "category": generator.choice(["open_qa", "closed_qa"]),
        }
        for _ in range(number)
    ]


def write(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("\n".join(map(json.dumps, records)) + "\n")
    return path


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ESPALIER_STATE_DIR", str(tmp_path / "state"))
    for name in ("client_text", "client_items"):
        monkeypatch.setattr(f"espalier.data.{name}.MIN_PREDICTIONS", 3)
    monkeypatch.setattr("espalier.data.client_items.MIN_ITEMS", 3)
    return tmp_path


def bench_of(folder: Path, task: str, records: Any, **more: Any) -> Bench:
    """Return a bench of four clients with one file of records each, and evaluation items."""
    paths = {
        "data.path": str(folder / "text-{client}.txt"),
        "task.test-path": str(folder / "test.jsonl"),
    }
    bench = Bench(folder, "fedpetuning", EVALUATED | TUNING | paths | {"task.name": task} | more)
    for client in range(bench.num_clients):
        write(folder / f"text-{client}.txt", records(client))
    write(folder / "test.jsonl", records(99))
    return bench


def metric(document: dict[str, Any], name: str) -> dict[str, Any]:
    (found,) = [
        entry
        for entry in document["metrics"]
        if entry["name"] == name and entry["dataset"] != "public"
    ]
    return found


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


def test_few_long_answers_are_too_few(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error does not reveal the number of answers."""
    monkeypatch.setattr("espalier.data.client_items.MIN_ITEMS", 10)
    bench = bench_of(
        folder, "dolly", instructions, **{"evaluation.own-text": True, "task.max-tokens": 400}
    )
    bench.model = save_tiny_llama(folder / "longer", positions=400)
    with pytest.raises(
        RunFailed,
        match=r"fewer than 10 held-out items, or they give fewer than 3 predictions \(answer",
    ):
        bench.run()


@pytest.fixture
def encoder(folder: Path) -> Bench:
    bench = bench_of(folder, "sst2", reviews)
    bench.model = save_tiny_roberta(folder / "encoder")
    return bench


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


def test_an_encoder_s_run_repeats(encoder: Bench) -> None:
    assert model_files(encoder.run(**NOT_COMPARED)) == model_files(encoder.run(**NOT_COMPARED))


def test_an_encoder_does_no_other_task(encoder: Bench) -> None:
    with pytest.raises(
        EspalierError,
        match=r"task.name = 'dolly': an encoder only classifies; choose sst2, mnli, boolq or class",
    ):
        encoder.run(task__name="dolly")


def test_wrong_test_items_are_refused_early(folder: Path) -> None:
    bench = bench_of(folder, "sst2", reviews)
    with pytest.raises(EspalierError, match=r"nowhere.jsonl: no such file; check task.test-path"):
        bench.run(task__test_path=str(folder / "nowhere.jsonl"))
    write(folder / "test.jsonl", [{"sentence": "oak", "label": 7}])
    with pytest.raises(EspalierError, match=r"test.jsonl: line 1"):
        bench.run()
    assert not (folder / "runs").exists()


def test_overlong_sequences_are_refused_early(
    encoder: Bench,
) -> None:
    """RoBERTa has 64 positions, but the first token has position 2.

    Position numbers follow the padding token's ID, which is 1.
    """
    told = (
        r"task.max-tokens = 63: the model has 62 positions \(max_position_embeddings .*\); set it"
        r" to 62 or less"
    )
    with pytest.raises(EspalierError, match=told):
        encoder.run(task__max_tokens=63)
    decoder = bench_of(encoder.folder, "sst2", reviews)
    with pytest.raises(
        EspalierError,
        match=r"task.max-tokens = 65: the model has 64 positions .*; set it to 64 or less",
    ):
        decoder.run(task__max_tokens=65)
    assert not (encoder.folder / "runs").exists()


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        (
            "training__base",
            "nf4",
            r"training.base = 'nf4': .*q_proj.weight has 16 .*; set training.base to 'bfloat16'",
        ),
        ("lora__targets", "attn.z", r"lora.targets: the model has no attn.z"),
        ("lora__rank", 17, r"lora.rank: 17 is larger than a side of attn.q"),
    ],
)
def test_incompatible_adapters_are_refused_early(
    folder: Path, key: str, value: object, told: str
) -> None:
    with pytest.raises(EspalierError, match=told):
        bench_of(folder, "sst2", reviews).run(**{key: value})
    assert not (folder / "runs").exists()


def sums(client: int, number: int = 40) -> list[dict[str, Any]]:
    words = random.Random(f"sum {client}").choices(WORDS, k=number)
    return [
        {"question": f"{word} {place}?", "answer": f"#### {place}"}
        for place, word in enumerate(words)
    ]


def test_answers_without_room_are_refused_early(
    folder: Path,
) -> None:
    bench = bench_of(folder, "gsm8k", sums)
    tokenizer = AutoTokenizer.from_pretrained(bench.model)
    with pytest.raises(
        EspalierError,
        match=r"has no end-of-text token, with which answers of the task gsm8k end; set",
    ):
        bench.run()
    tokenizer.eos_token = "<s>"
    tokenizer.save_pretrained(bench.model)
    prompt = max(
        len(tokenizer(f"Question: {record['question']}\nAnswer:")["input_ids"])
        for record in sums(99)
    )
    told = (
        rf"task.answer-tokens = 256: .*{prompt} tokens. this makes {prompt + 256} tokens, .* 64 .* to"
        rf" {64 - prompt} or less"
    )
    with pytest.raises(EspalierError, match=told):
        bench.run()
    assert not (folder / "runs").exists()
    few = {"task__answer_tokens": 64 - prompt, "task__max_test_items": 2, "federation__rounds": 1}
    document = summary(bench.run(**few, **NOT_COMPARED))
    assert 0 <= metric(document, "strict-match")["values"]["federated"] <= 1


@pytest.mark.parametrize("source", ["documentation", "files"])
def test_deployed_site_without_data_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    monkeypatch.setattr("espalier.flower.shared_nodes.GRIDS", ())
    changes: dict[str, Any] = {
        "data__source": source,
        "data__path": "",
        "federation__rounds": 1,
        "quorum": 0.5,
        **NOT_COMPARED,
    }
    bench = bench_of(folder, "sst2", reviews)
    grid = bench.grid(**changes)
    grid.simulated = False
    for context in grid.contexts.values():
        context.node_config |= {
            "model-path": str(bench.model),
            "data-task": "sst2",
            "min-tokens": 1,
        }
    (without,) = [
        context for context in grid.contexts.values() if context.node_config["partition-id"] == 1
    ]
    without.node_config.pop("data-path")
    document = summary(bench.run(grid, **changes))
    assert [client["site"] for client in document["clients"]] == [
        "node-00000",
        "node-00002",
        "node-00003",
    ]
    (reason,) = document["refused"].values()
    assert "data-path: this site names no file" in reason


def test_client_without_items_is_refused(folder: Path) -> None:
    bench = bench_of(folder, "sst2", reviews)
    (folder / "text-2.txt").write_text("{}\n")
    document = summary(bench.run(**NOT_COMPARED))
    assert [client["site"] for client in document["clients"]] == [
        "node-00000",
        "node-00001",
        "node-00003",
    ]
    (reason,) = document["refused"].values()
    assert "line 1" in reason


def long_reviews(client: int, number: int = 30) -> list[dict[str, Any]]:
    """Return records of which 10% are too long for the tiny model."""
    records = reviews(client, number)
    for record in records[::10]:
        record["sentence"] = " ".join([record["sentence"], *WORDS, *WORDS])
    return records


def test_summary_counts_truncated_test_items(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = bench_of(
        folder,
        "sst2",
        long_reviews,
        **{"evaluation.local-baseline": False, "evaluation.centralized": "off"},
    )
    bench.model = save_tiny_llama(folder / "short", positions=100)
    document = summary(bench.run(federation__rounds=1))
    assert document["test_items"] == {"number": 30, "cut": 3}
    assert (
        "truncated: 3 of 30 test items, longer than the model accepts (" in capsys.readouterr().out
    )
    longer = save_tiny_llama(folder / "longer", positions=600)
    document = summary(bench.run(federation__rounds=1, model=str(longer)))
    assert document["test_items"] == {"number": 30, "cut": 0}


def test_a_site_whose_model_takes_less_is_refused(folder: Path) -> None:
    """The server's model accepts items that are too long for the site's model.

    The site would fail on them or compute meaningless values.
    """
    bench = bench_of(
        folder, "sst2", long_reviews, **{"evaluation.centralized": "off", "quorum": 0.5}
    )
    bench.model = save_tiny_llama(folder / "longer", positions=600)
    other = folder / "shorter"
    shutil.copytree(bench.model, other)
    config = json.loads((other / "config.json").read_text()) | {"max_position_embeddings": 64}
    (other / "config.json").write_text(json.dumps(config))
    grid = bench.grid(federation__rounds=1)
    next(iter(grid.contexts.values())).node_config["model-path"] = str(other)
    document = summary(bench.run(grid, federation__rounds=1))
    reasons = [client["reason"] or "" for client in document["clients"]]
    assert reasons == [""] * 3
    (reason,) = document["refused"].values()
    assert "has another base model" in reason


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
