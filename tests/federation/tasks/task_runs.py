"""Records of clients, and runs that tune on them."""

import json
import random
from pathlib import Path
from typing import Any

from tests.bench import EVALUATED, Bench
from tests.tiny_model import WORDS

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
