"""Test items are scored whole, up to the model's limit, for any length of training sequences."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from espalier.data.client_items import as_tests
from espalier.data.tasks.catalogue import task_named
from espalier.data.tasks.fields import Fields
from espalier.data.tasks.item import Item
from espalier.errors import EspalierError
from espalier.evaluation import scores
from espalier.evaluation.scores import log_likelihoods
from espalier.hf.opening.base_check import require_within_limits
from espalier.hf.opening.opened_model import OpenedModel
from espalier.settings.run import RunSettings, parse
from server_app.artifacts.task_scores import num_cut
from server_app.public_tests import PublicTests
from tests.tiny_model import WORDS, save_tiny_llama, save_tiny_roberta

POSITIONS = 600


def boolq(words: int) -> Item:
    """Return a question after a long passage."""
    passage = " ".join(random.Random(words).choices(WORDS, k=words))
    return task_named("boolq").item(
        Fields({"passage": passage, "question": "is the oak a tree", "answer": True}, "here")
    )


def settings_of(model: Path, **task: Any) -> RunSettings:
    changes = {f"task.{key.replace('_', '-')}": value for key, value in task.items()}
    return parse(
        {
            "method": "fedpetuning",
            "model": str(model),
            "task.name": "boolq",
            "data.path": "x",
            "data.source": "files",
        }
        | changes
    )


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> OpenedModel:
    return OpenedModel(
        save_tiny_llama(tmp_path_factory.mktemp("long"), dtype=torch.float32, positions=POSITIONS)
    )


def plainly(model: Any, tokens: list[int], first: int) -> float:
    """Return the log-likelihood of all tokens from ``first`` on, one forward pass per token."""
    found = 0.0
    for place in range(first, len(tokens)):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([tokens[:place]])).logits[0, -1]
        found += float(logits.log_softmax(-1)[tokens[place]])
    return found


def test_long_items_are_scored_with_whole_prompts(long: OpenedModel) -> None:
    items = [boolq(words) for words in (5, 80, 130)]
    tests = as_tests(settings_of(long.directory, max_tokens=64), items, long)
    assert tests.cut == ()
    assert max(len(one.token_ids) for one in tests.requests) > 256
    model = AutoModelForCausalLM.from_pretrained(long.directory).eval()
    found = log_likelihoods(model, tests.requests, 4, "cpu")
    requests = [request for item in items for request in item.requests]
    for one, (context, answer) in zip(tests.requests, requests, strict=True):
        tokens = long.tokenizer.encode(context + answer)
        assert list(one.token_ids) == tokens
        assert found[one] == pytest.approx(
            plainly(model, tokens, len(long.tokenizer.encode(context))), abs=1e-3
        )


def test_tokens_beyond_limit_are_cut(long: OpenedModel) -> None:
    """The model reads one token less than is scored, because nothing follows the last one."""
    items = [boolq(5), boolq(700)]
    tests = as_tests(settings_of(long.directory), items, long)
    assert [len(one.token_ids) for one in tests.requests[2:]] == [POSITIONS + 1] * 2
    assert tests.cut == (1,)
    model = AutoModelForCausalLM.from_pretrained(long.directory).eval()
    assert all(value < 0 for value in log_likelihoods(model, tests.requests, 4, "cpu").values())


def test_limit_may_be_lowered_but_not_raised(long: OpenedModel) -> None:
    tests = as_tests(settings_of(long.directory, max_test_tokens=100), [boolq(5), boolq(80)], long)
    assert (max(len(one.token_ids) for one in tests.requests), tests.cut) == (100, (1,))
    with pytest.raises(
        EspalierError, match=r"task\.max-test-tokens = 601: the model has 600 positions"
    ):
        require_within_limits(settings_of(long.directory, max_test_tokens=601), long)
    with pytest.raises(EspalierError, match=r"raise task\.max-test-tokens"):
        as_tests(settings_of(long.directory, max_test_tokens=1), [boolq(5)], long)


def test_prompts_cut_for_answers_are_counted(
    long: OpenedModel,
) -> None:
    """Prompts of three lengths, with room for answers of 500 and of 3 tokens."""
    words = random.Random(0).choices(WORDS, k=700)
    records = [
        {"question": " ".join(words[:number]), "answer": "#### 4"} for number in (2, 60, 700)
    ]
    items = [task_named("gsm8k").item(Fields(record, "here")) for record in records]
    for answer_tokens, expected in ((3, 1), (500, 2)):
        settings = settings_of(long.directory, name="gsm8k", answer_tokens=answer_tokens)
        tests = PublicTests({}, items, as_tests(settings, items, long))
        assert tests.encoded is not None
        assert tests.encoded.cut == (2,)
        assert num_cut(settings, long, tests) == expected


def test_encoder_reads_up_to_its_positions(tmp_path: Path) -> None:
    model = OpenedModel(save_tiny_roberta(tmp_path / "encoder"))
    items = [boolq(20), boolq(200)]
    tests = as_tests(settings_of(model.directory, max_tokens=16), items, model)
    whole = [len(model.tokenizer(*item.texts)["input_ids"]) for item in items]
    assert model.num_positions is not None
    assert 16 < whole[0] < model.num_positions < whole[1]
    assert [len(one.token_ids) for one in tests.requests] == [whole[0], model.num_positions]
    assert tests.cut == (1,)


def test_tokens_of_a_pass_are_bounded(long: OpenedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few long texts pass the model at a time; scores differ only by rounding."""
    items = [boolq(words) for words in (90, 91, 92, 10, 11, 12, 13)]
    tests = as_tests(settings_of(long.directory), items, long)
    model = AutoModelForCausalLM.from_pretrained(long.directory).eval()
    expected = log_likelihoods(model, tests.requests, 16, "cpu")
    seen = list[tuple[int, int]]()
    model.register_forward_pre_hook(
        lambda _, given, named: seen.append(tuple(named["input_ids"].shape)), with_kwargs=True
    )
    monkeypatch.setattr(scores, "TOKENS_IN_A_PASS", 500)
    found = log_likelihoods(model, tests.requests, 16, "cpu")
    assert found == pytest.approx(expected, abs=1e-3)
    assert all(rows == 1 or rows * tokens <= 500 for rows, tokens in seen)
    assert max(rows for rows, _ in seen) > 1
