"""Private tuning on items of a task: an encoder with a head, and conversations of groups."""

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from espalier.hf.opening.opened_model import open_model
from espalier.settings.node import parse_node
from espalier.settings.run import parse
from espalier.training.private.sequences import private_sequences
from tests.bench import Bench, Home, home, summary
from tests.tiny_model import WORDS, save_tiny_roberta

pytest.importorskip("opacus", reason="needs the extra privacy")

PRIVATE_TUNING = {
    "privacy.epsilon": 8.0, "privacy.noise": "seed", "privacy.sampling-rate": 0.2,
    "federation.client-weights": "equal", "federation.rounds": 1, "training.steps": 2,
    "training.batch-size": 4, "lora.rank": 2, "data.source": "files",
}  # fmt: skip


def reviews(client: int, number: int = 60) -> list[dict[str, Any]]:
    generator = random.Random(client)
    return [
        {
            "sentence": " ".join([*generator.choices(WORDS, k=5), str(generator.randrange(9999))]),
            "label": generator.randrange(2),
        }
        for _ in range(number)
    ]


def write(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text("\n".join(map(json.dumps, records)) + "\n")


def test_an_encoder_with_its_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ESPALIER_STATE_DIR", str(tmp_path / "state"))
    model = save_tiny_roberta(tmp_path / "roberta")
    task = {
        "task.name": "sst2", "task.max-tokens": 20,
        "data.path": str(tmp_path / "text-{client}.txt"),
        "task.test-path": str(tmp_path / "test.jsonl"),
    }  # fmt: skip
    shared = Home(model, home(tmp_path).public)
    bench = Bench(tmp_path, "fedpetuning", PRIVATE_TUNING | task, 2, home=shared)
    for client in range(2):
        write(tmp_path / f"text-{client}.txt", reviews(client))
    write(tmp_path / "test.jsonl", reviews(99))
    found = summary(bench.run())
    assert found["status"] == "completed"
    assert 7 < found["privacy"]["epsilon"] <= 8
    assert {"acc", "loss"} <= {metric["name"] for metric in found["metrics"]}


def test_conversations_of_a_group_are_one_unit(tmp_path: Path) -> None:
    """Every patient has three conversations; one that two patients share is in both."""
    shared = home(tmp_path)
    records = []
    for patient in range(12):
        records += [
            {"question": f"{word} {patient}", "reply": word, "patient": str(patient)}
            for word in WORDS[:2]
        ]
        records.append({"question": "shared", "reply": "oak", "patient": str(patient)})
    write(tmp_path / "records.jsonl", records)
    task = {
        "model": str(shared.model), "method": "fedpetuning", "task.name": "completion",
        "data.prompt": "{question}\n", "task.max-tokens": 40, "evaluation.local-baseline": False,
    }  # fmt: skip
    node = parse_node(
        {
            "site": "a", "data-path": str(tmp_path / "records.jsonl"), "data-task": "completion",
            "data-group": "patient", "data-columns": "question=question,answer=reply",
            "state-dir": str(tmp_path / "state"), "min-tokens": 1,
        }
    )  # fmt: skip
    run = parse(PRIVATE_TUNING | task | {"data.source": "auto"})
    sequences, units = private_sequences(run, node, open_model(str(shared.model)), 0)
    assert 8 <= len(units) <= 12
    assert all(len(unit) == 3 for unit in units)
    assert sorted(number for unit in units for number in unit) == list(range(len(sequences)))


def test_one_record_more_leaves_the_sequences_of_the_others(tmp_path: Path) -> None:
    """A record that equals another one up to white space does not replace it."""
    shared = home(tmp_path)
    task = {
        "model": str(shared.model), "method": "fedpetuning", "task.name": "completion",
        "data.prompt": "{question}\n", "task.max-tokens": 40, "evaluation.local-baseline": False,
    }  # fmt: skip
    run = parse(PRIVATE_TUNING | task | {"data.source": "auto"})
    records = [{"question": f"oak {number}  river", "reply": "pine"} for number in range(20)]
    more = [{"question": "oak 3 river", "reply": "pine"}, *records, records[5]]
    found = []
    for place, rows in enumerate((records, more)):
        write(tmp_path / f"{place}.jsonl", rows)
        node = parse_node(
            {
                "site": "a", "data-path": str(tmp_path / f"{place}.jsonl"),
                "data-task": "completion", "data-columns": "question=question,answer=reply",
                "state-dir": str(tmp_path / "state"), "min-tokens": 1,
            }
        )  # fmt: skip
        sequences, units = private_sequences(run, node, open_model(str(shared.model)), 0)
        tokens = [tuple(sequences.parts[0][number].token_ids) for (number,) in units]
        found.append(Counter(tokens))
    without, with_more = found
    assert without <= with_more
    assert with_more.total() - without.total() == 2
