"""``espalier eval``: errors without the harness, and scores with it (extra lm-eval)."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from espalier.cli.command import main as command
from espalier.errors import InputError
from espalier.results.finished_run import open_run
from espalier.results.use.harness import main
from espalier.results.use.harness_records import IN_THE_HUBS_FORM, with_local_data
from espalier.results.use.scores import Score, store
from tests.results.run_directories import save_run
from tests.tiny_model import save_tiny_llama

needs_harness = pytest.mark.skipif(find_spec("lm_eval") is None, reason="needs the extra lm-eval")
WORDS = ["oak", "fir", "elder", "ivy"]


@pytest.fixture(scope="module", autouse=True)
def tasks_listed_once() -> Iterator[None]:
    """Keep the harness's list of tasks, which takes seconds to read, for the tests of this file."""
    if find_spec("lm_eval") is None:
        yield
        return
    from lm_eval import tasks

    manager = cache(tasks.TaskManager)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(
            tasks,
            "TaskManager",
            lambda include_path=None, **rest: manager(tuple(include_path or ()) or None, **rest),
        )
        yield


@pytest.fixture
def run(tmp_path: Path) -> Path:
    base = save_tiny_llama(tmp_path / "base", dtype=torch.float32, positions=64)
    shown = {"seed": 0, "rounds": 1, "clients": [], "versions": {}, "threads": 1, "device": "cpu"}
    path = save_run(tmp_path / "run", {"model": str(base)}, base=[], **shown)
    save_tiny_llama(path / "model", seed=5, dtype=torch.float32, positions=64)
    return path


@pytest.fixture
def records(tmp_path: Path) -> Path:
    """Published form of arc_easy, with six items."""
    lines = []
    for number in range(6):
        choices = [
            {"text": word * (1 + number % 2), "label": label}
            for word, label in zip(WORDS, "ABCD", strict=True)
        ]
        question = {"stem": f"which tree {number}", "choices": choices}
        lines.append(json.dumps({"question": question, "answerKey": "ABCD"[number % 4]}))
    file = tmp_path / "arc.jsonl"
    file.write_text("\n".join(lines) + "\n\n")
    return file


def document(run: Path, records: Path, **changes: Any) -> dict[str, Any]:
    return {
        "run": str(run), "base": None, "device": "cpu", "clients": [], "with_base": True,
        "tasks": ["arc_easy"], "include": [], "data": {"arc_easy": str(records)}, "limit": None,
        "num_fewshot": None, "batch_size": 2,
    } | changes  # fmt: skip


def accuracy(folder: Path, records: Path) -> float:
    """Return the accuracy by a loop over options: the sum of log-probabilities of their tokens."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    right = []
    for line in filter(None, records.read_text().split("\n")):
        record = json.loads(line)
        prompt = f"Question: {record['question']['stem']}\nAnswer:"
        sums = []
        for choice in record["question"]["choices"]:
            start = len(tokenizer(prompt)["input_ids"])
            ids = tokenizer(f"{prompt} {choice['text']}", return_tensors="pt")["input_ids"]
            with torch.no_grad():
                logs = model(ids).logits[0].log_softmax(-1)
            sums.append(sum(float(logs[at - 1, ids[0, at]]) for at in range(start, ids.shape[1])))
        right.append("ABCD"[sums.index(max(sums))] == record["answerKey"])
    return sum(right) / len(right)


@needs_harness
def test_scores_of_result_and_base(
    run: Path, records: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(document(run, records)) == 0
    out = capsys.readouterr().out
    stored = json.loads((run / "lm_eval.json").read_text())["scores"]
    found = {score["model"]: score for score in stored if score["metric"] == "acc"}
    assert found["base"]["value"] == pytest.approx(accuracy(tmp_path / "base", records))
    assert found["result"]["value"] == pytest.approx(accuracy(run / "model", records))
    assert found["result"]["items"] == 6
    assert f"{found['result']['value']:.4f}" in out
    assert {score["metric"] for score in stored} == {"acc", "acc_norm"}
    page = (run / "report.html").read_text()
    assert "Public tasks" in page
    assert f"{found['result']['value']:.4f}" in page


@needs_harness
@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"tasks": ["arc_esy"], "data": {}}, "task 'arc_esy': .* did you mean arc_easy"),
        ({"data": {"boolq": "x.jsonl"}}, "--data boolq=...: the task is not in --tasks"),
        ({"data": {"arc_easy": "none.jsonl"}}, "none.jsonl: cannot be read"),
        ({"tasks": ["mmlu"], "data": {"mmlu": "x"}}, "--data mmlu=x: is a group"),
        ({"include": ["nowhere"]}, "--include-path nowhere: is not a directory"),
    ],
)
def test_wrong_tasks_are_told(
    run: Path,
    records: Path,
    changes: dict[str, Any],
    told: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(document(run, records, **changes)) == 2
    assert re.search(told, capsys.readouterr().err)
    assert not (run / "lm_eval.json").exists()


def test_a_missing_result_is_told_before_the_hub_is_asked(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("espalier.results.use.harness.use_cache_if_unreachable", pytest.fail)
    assert main(document(run, run, data={}, clients=["7"])) == 2
    assert "has no model of client '7'" in capsys.readouterr().err


def test_missing_harness_is_told(
    run: Path,
    records: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("espalier.results.use.harness.find_spec", lambda _: None)
    assert main(document(run, records)) == 2
    assert "pip install -c constraints.txt -e '.[lm-eval]'" in capsys.readouterr().err


def test_repeated_evaluation_replaces_the_earlier_one(run: Path) -> None:
    old = Score("result", "arc_easy", "acc", 0.25, 0.1, 6, 0)
    finished = open_run(run)
    store(finished, [old, replace(old, model="base")], "0.4.13", None)
    store(finished, [replace(old, value=0.5)], "0.4.13", None)
    store(finished, [replace(old, value=0.75)], "0.4.13", 3)
    stored = json.loads((run / "lm_eval.json").read_text())["scores"]
    found = [(score["model"], score["value"], score["limit"]) for score in stored]
    assert found == [("base", 0.25, None), ("result", 0.5, None), ("result", 0.75, 3)]


def test_published_records_take_the_hubs_form(tmp_path: Path) -> None:
    assert IN_THE_HUBS_FORM["hellaswag"]({"ctx": "a b", "label": 3}) == {
        "ctx": "a b", "ctx_a": "a b", "ctx_b": "", "label": "3",
    }  # fmt: skip
    assert IN_THE_HUBS_FORM["mnli"]({"label": "neutral"})["label"] == 1
    (tmp_path / "bad.jsonl").write_text('{"question": "x"}\n{"question": {}}\n')
    with pytest.raises(InputError, match=r"--data arc_easy=.*bad\.jsonl: line 2 is no record"):
        with_local_data({}, "arc_easy", tmp_path / "bad.jsonl", tmp_path)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--limit", "0"], "--limit 0: must be at least 1"),
        (["--data", "arc_easy"], "--data arc_easy: write TASK=FILE"),
    ],
)
def test_wrong_options_are_told(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(["eval", "RUN", "--tasks", "arc_easy", *words]) == 2
    assert told in capsys.readouterr().err
