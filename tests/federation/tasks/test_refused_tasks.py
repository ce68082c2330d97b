"""Tasks, items and sites that do not fit: they are refused early, or counted."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from espalier.errors import EspalierError
from strategies.base.rounds import RunFailed
from tests.bench import Bench, summary
from tests.federation.tasks.task_runs import (
    NOT_COMPARED,
    bench_of,
    instructions,
    metric,
    reviews,
    write,
)
from tests.tiny_model import WORDS, save_tiny_llama


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
        rf"task.answer-tokens = 256: .*{prompt} tokens. this makes {prompt + 256} tokens, .* 64 .*"
        rf" to {64 - prompt} or less"
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
