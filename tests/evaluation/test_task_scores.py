"""The scores that a task names, each with its level of chance."""

import math
from typing import Any

import pytest
import torch
from tiny_model import save_tiny_llama
from transformers import AutoModelForCausalLM, AutoTokenizer

from espalier.corpora.tasks.catalogue import TASKS
from espalier.corpora.tasks.fields import Fields
from espalier.corpora.tasks.item import Item
from espalier.evaluation.task_scores import task_scores
from espalier.settings.mistakes import Mistake


@pytest.fixture(scope="module")
def blank(tmp_path_factory: pytest.TempPathFactory, device: torch.device) -> tuple[Any, Any]:
    """A model to which all tokens are equally likely."""
    folder = save_tiny_llama(tmp_path_factory.mktemp("model"), dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype=torch.float32).eval()
    with torch.no_grad():
        model.model.norm.weight.zero_()
    return model.to(device), AutoTokenizer.from_pretrained(folder, local_files_only=True, eos_token="<s>")


def items(task: str, *records: dict[str, Any]) -> list[Item]:
    return [TASKS[task].item(Fields(record, "here")) for record in records]


def test_accuracy_beside_the_commonest_class_or_guessing(blank: tuple[Any, Any], device: torch.device) -> None:
    reviews = items("sst2", *({"sentence": "oak", "label": label} for label in (0, 1, 1, 1)))
    scores = task_scores(*blank, TASKS["sst2"], reviews, 60, device=device)
    assert list(scores) == ["acc"]
    assert (scores["acc"].value, scores["acc"].chance) == (0.25, 0.75)
    goals = items("piqa", *({"goal": "oak", "sol1": "x", "sol2": "y", "label": label} for label in (0, 1)))
    scores = task_scores(*blank, TASKS["piqa"], goals, 60, device=device)
    assert {name: (score.value, score.chance) for name, score in scores.items()} == {"acc": (0.5, 0.5), "acc_norm": (0.5, 0.5)}


def test_the_loss_beside_that_of_equal_likelihoods(blank: tuple[Any, Any], device: torch.device) -> None:
    trees = items("alpaca", {"instruction": "Name a tree.", "input": "", "output": "oak fir"})
    scores = task_scores(*blank, TASKS["alpaca"], trees, 60, device=device)
    vocabulary = blank[0].config.vocab_size
    assert list(scores) == ["loss"]
    assert (scores["loss"].value, scores["loss"].chance) == pytest.approx((math.log(vocabulary), math.log(vocabulary)))


def test_generated_answers_by_pattern(blank: tuple[Any, Any], device: torch.device) -> None:
    """The model always writes the token of number 0, which ends the text."""
    pears = items("gsm8k", {"question": "Two and two?", "answer": "#### 4"})
    scores = task_scores(*blank, TASKS["gsm8k"], pears, 400, device=device)
    assert list(scores) == ["strict-match", "flexible-extract", "loss"]
    assert (scores["strict-match"].value, scores["strict-match"].chance) == (0.0, 0.0)


def test_no_items_is_a_mistake(blank: tuple[Any, Any], device: torch.device) -> None:
    with pytest.raises(Mistake, match="task sst2: there are no items to score"):
        task_scores(*blank, TASKS["sst2"], [], 60, device=device)
