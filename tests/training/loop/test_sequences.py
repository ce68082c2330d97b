"""Training sequences do not depend on the tokens that a tokenizer appends to a text."""

import json
from pathlib import Path

import pytest
import torch

from espalier.data.client_items import client_items
from espalier.data.tasks.catalogue import TASKS
from espalier.errors import EspalierError
from espalier.hf.opening.opened_model import OpenedModel
from espalier.settings.node import simulated_node
from espalier.settings.run import RunSettings, parse
from espalier.training.sequences import client_sequences
from tests.data.tasks.task_records import RECORDS
from tests.data.tasks.tokens_at_ends import (
    END,
    KINDS,
    raw_tokenizer,
    save_tokenizer_adding,
    split_slowly,
)
from tests.tiny_model import save_tiny_llama, save_tiny_roberta

WRITTEN = {"gsm8k", "dolly", "alpaca", "completion"}
LONG = 500


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("model"))


def settings_of(task: str, folder: Path) -> RunSettings:
    records = [{**RECORDS.get(task, TASKS[task].sample), "id": number} for number in range(3)]
    (folder / "items.jsonl").write_text("\n".join(map(json.dumps, records)))
    given = {
        "method": "fedpetuning",
        "task.name": task,
        "data.source": "files",
        "data.path": str(folder / "items.jsonl"),
        "data.prompt": "{question}\n" if task == "completion" else "{text}",
        "data.labels": "negative,positive",
    }
    return parse(given | {"task.max-tokens": LONG, "num-clients": 1})


@pytest.mark.parametrize("kind", KINDS)
def test_sequences_equal_a_slow_reference(
    kind: tuple[bool, bool, bool], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A written answer is followed by one end token, an option of a choice by none."""
    monkeypatch.setattr("espalier.data.passages.HELD_OUT_PERCENT", 0)
    start, _, prefix_space = kind
    save_tokenizer_adding(model, *kind)
    opened = OpenedModel(model)
    made = raw_tokenizer(prefix_space)
    for task in sorted({*TASKS} - {"chat"}):
        settings = settings_of(task, tmp_path)
        (item,), _ = client_items(settings, simulated_node(), 0)
        before, answer = split_slowly(made, start, *item.requests[item.answer])
        answer += [END] if task in WRITTEN else []
        batch = client_sequences(settings, simulated_node(), opened, 0).batch([0])
        assert batch.input_ids.tolist() == [before + answer]
        assert batch.labels.tolist() == [[-100] * len(before) + answer]


def test_encoder_without_padding_token_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("espalier.data.passages.HELD_OUT_PERCENT", 0)
    folder = save_tiny_roberta(tmp_path / "model")
    settings = settings_of("sst2", tmp_path)
    assert len(client_sequences(settings, simulated_node(), OpenedModel(folder), 0)) == 1
    path = folder / "tokenizer_config.json"
    path.write_text(
        json.dumps(
            {
                name: value
                for name, value in json.loads(path.read_text()).items()
                if name != "pad_token"
            }
        )
    )
    with pytest.raises(EspalierError, match=r"no padding token, .*; set pad_token"):
        client_sequences(settings, simulated_node(), OpenedModel(folder), 0)


def test_batches_of_an_encoder_are_those_of_its_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("espalier.data.passages.HELD_OUT_PERCENT", 0)
    folder = save_tiny_roberta(tmp_path / "model")
    settings = settings_of("sst2", tmp_path)
    records = [
        {"sentence": f"elm {'oak ' * number}", "label": number % 2} for number in range(1, 9)
    ]
    lines = [json.dumps(record) for record in records]
    (tmp_path / "items.jsonl").write_text("\n".join(lines))
    model = OpenedModel(folder)
    sequences = client_sequences(settings, simulated_node(), model, 0)
    texts, classes = zip(*(record.values() for record in records), strict=True)
    expected = model.tokenizer(
        list(texts), truncation=True, max_length=LONG, padding=True, return_tensors="pt"
    )
    batch = sequences.batch(range(8))
    assert torch.equal(batch.input_ids, expected["input_ids"])
    assert torch.equal(batch.attention_mask, expected["attention_mask"])
    assert batch.labels.tolist() == list(classes)
    short = sequences.batch([0])
    assert short.input_ids.tolist() == [model.tokenizer.encode(texts[0])]
