"""Scores of models whose answers are known by hand, on items as runs encode them."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from espalier.data.tasks.catalogue import TASKS
from espalier.data.tasks.encoding import Encoded
from espalier.data.tasks.fields import Fields
from espalier.data.tasks.item import Item
from espalier.data.tasks.scored_items import ScoredItems, class_items, scored_items
from espalier.evaluation.exact_match import exact_match, generate
from espalier.evaluation.scores import chance_of_options, majority_share, score, uniform_loss
from tests.evaluation.model_of_logits import ModelOfLogits
from tests.tiny_model import save_tiny_llama, save_tokenizer

pytestmark = pytest.mark.usefixtures("tests_on_device")

VOCABULARY = 8


# ----- loss ---------------------------------------------------------------------------------------


def counted(input_ids: Tensor) -> Tensor:
    """Give probability 1/2 to the next number and share the rest evenly."""
    logits = torch.zeros(*input_ids.shape, VOCABULARY)
    return logits.scatter_(2, ((input_ids + 1) % VOCABULARY)[..., None], math.log(VOCABULARY - 1))


COUNTING = ModelOfLogits(VOCABULARY, counted)
RIGHT = math.log(2)
WRONG = math.log(2 * (VOCABULARY - 1))


def written(*encoded: Encoded) -> ScoredItems:
    """Return items with one answer each."""
    ones = (1,) * len(encoded)
    return ScoredItems(encoded, ones, (0,) * len(encoded), ones)


@pytest.mark.parametrize("batch_size", [1, 2, 16])
def test_every_token_of_an_answer_counts_as_much(batch_size: int, device: torch.device) -> None:
    """Covers two equal items; there is no choice and therefore no accuracy."""
    twice = Encoded((3, 0), 1)
    items = written(Encoded((1, 5, 6, 7), 2), twice, Encoded((2, 3, 4, 5, 0, 1), 4), twice)
    found = score(COUNTING, items, False, batch_size, device)
    assert found == {
        "loss": pytest.approx((2 * RIGHT + WRONG + 3 * RIGHT + WRONG + WRONG) / 8, rel=1e-6)
    }


def test_first_token_of_the_text_is_not_scored(
    device: torch.device,
) -> None:
    found = score(
        COUNTING, written(Encoded((1, 5, 6, 7), 3), Encoded((0, 1), 1)), False, 16, device
    )
    assert found["loss"] == pytest.approx((WRONG + 3 * RIGHT) / 4, rel=1e-6)


def test_loss_is_that_of_the_right_option(device: torch.device) -> None:
    items = ScoredItems(
        (Encoded((1, 2), 1), Encoded((1, 5, 6), 2), Encoded((6, 7, 0), 2)),
        (2, 1),
        (1, 0),
        (1, 1, 1),
    )
    assert score(COUNTING, items, False, 4, device)["loss"] == pytest.approx(
        (WRONG + 3 * RIGHT) / 4, rel=1e-6
    )


# ----- options ------------------------------------------------------------------------------------


def of_two(
    values: list[float], characters: tuple[int, int], answer: int
) -> tuple[Any, ScoredItems]:
    """Return a model that gives two single-word options these log-likelihoods, up to a constant."""
    always = ModelOfLogits(2, lambda input_ids: torch.tensor(values).expand(*input_ids.shape, -1))
    return always, ScoredItems(
        (Encoded((0, 0), 1), Encoded((0, 1), 1)), (2,), (answer,), characters
    )


@pytest.mark.parametrize("value", [0.0, 2.0, -1e30])
def test_of_equal_options_the_first_is_chosen(value: float, device: torch.device) -> None:
    """Covers options that are almost impossible."""
    always = ModelOfLogits(
        3, lambda input_ids: torch.tensor([value, value, 0.0]).expand(*input_ids.shape, -1)
    )
    for answer, right in ((0, 1.0), (1, 0.0)):
        items = ScoredItems((Encoded((0, 0), 1), Encoded((0, 1), 1)), (2,), (answer,), (1, 1))
        found = score(always, items, False, 2, device)
        assert (found["acc"], found["acc_norm"]) == (right, right)


def test_impossible_option_is_wrong_not_missing(device: torch.device) -> None:
    """Two tokens of -3e38 nats sum to minus infinity in float32."""
    always = ModelOfLogits(
        2, lambda input_ids: torch.tensor([-3e38, 0.0]).expand(*input_ids.shape, -1)
    )
    for answer in (0, 1):
        items = ScoredItems((Encoded((0, 0, 0), 2), Encoded((0, 1), 1)), (2,), (answer,), (2, 1))
        found = score(always, items, False, 2, device)
        assert found == {
            "loss": 0.0 if answer else math.inf,
            "acc": float(answer),
            "acc_norm": float(answer),
        }


def test_accuracy_per_option_and_per_character(device: torch.device) -> None:
    """The values are -1.31 and -0.31 nats, or -0.131 and -0.31 nats per character."""
    for answer in (0, 1):
        found = score(*of_two([0.0, 1.0], (10, 1), answer), False, 2, device)
        assert (found["acc"], found["acc_norm"]) == (float(answer == 1), float(answer == 0))


def test_characters_are_counted_not_bytes() -> None:
    items = [Item(("?",), ("éé", "eee"), 1), Item(("?",), ("ab", "abcdef"), 0)]
    found = scored_items(TASKS["piqa"], items, lambda text: [ord(one) for one in text], 20)
    assert found.characters == (2, 3, 2, 6)


@pytest.mark.parametrize("answer", [0, 1])
def test_a_model_without_numbers_is_never_right(answer: int, device: torch.device) -> None:
    found = score(*of_two([math.nan, 0.0], (1, 1), answer), False, 2, device)
    assert (found["acc"], found["acc_norm"]) == (0.0, 0.0)
    assert math.isnan(found["loss"])


def test_the_share_of_items_that_are_right(device: torch.device) -> None:
    """The model chooses the option that continues counting."""
    requests = tuple(
        Encoded((first, second), 1)
        for first, second in ((1, 2), (1, 3), (4, 0), (4, 5), (6, 7), (6, 2))
    )
    items = ScoredItems(requests, (2, 2, 2), (0, 1, 1), (1,) * 6)
    assert score(COUNTING, items, False, 4, device)["acc"] == pytest.approx(2 / 3)


# ----- classes ------------------------------------------------------------------------------------


def text_item(text: str, answer: int) -> Item:
    return Item(("?",), ("short", "long"), answer, texts=(text,))


class Measuring:
    """Encoder that calls a text long if it has more than six tokens; padding must not count."""

    config = SimpleNamespace(pad_token_id=0)

    def __call__(self, input_ids: Tensor, attention_mask: Tensor) -> SimpleNamespace:
        return SimpleNamespace(
            logits=torch.stack([torch.full((len(input_ids),), 6.0), attention_mask.sum(1)], dim=1)
        )


@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_the_share_of_items_whose_class_is_named(
    batch_size: int, tmp_path: Path, device: torch.device
) -> None:
    """The first of equal classes counts; with at most five tokens every text is short."""
    save_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path, pad_token="<s>")
    items = [
        text_item("x" * length, answer)
        for length, answer in ((3, 0), (20, 1), (4, 1), (9, 0), (6, 0))
    ]

    def accuracy(few: list[Item], max_tokens: int) -> float:
        return score(
            Measuring(), class_items(few, tokenizer, max_tokens), True, batch_size, device
        )["acc"]

    assert accuracy(items, 32) == 3 / 5
    assert accuracy(items, 5) == 3 / 5
    assert accuracy(items[:3], 5) == 1 / 3


def test_encoder_with_nan_logits_is_never_right(tmp_path: Path, device: torch.device) -> None:
    save_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path, pad_token="<s>")

    def broken(**_: Any) -> SimpleNamespace:
        return SimpleNamespace(logits=torch.tensor([[math.nan, 0.0]]))

    broken.config = SimpleNamespace(pad_token_id=0)  # type: ignore[attr-defined]
    for answer in (0, 1):
        assert (
            score(broken, class_items([text_item("x", answer)], tokenizer, 8), True, 4, device)[
                "acc"
            ]
            == 0.0
        )


# ----- a model that has learnt nothing ------------------------------------------------------------


@pytest.fixture(scope="module")
def blank(tmp_path_factory: pytest.TempPathFactory, device: torch.device) -> tuple[Any, Any]:
    """Language model to which all tokens are equally likely."""
    folder = save_tiny_llama(tmp_path_factory.mktemp("model"), dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(
        folder, local_files_only=True, dtype=torch.float32
    ).eval()
    with torch.no_grad():
        model.model.norm.weight.zero_()
    return model.to(device), AutoTokenizer.from_pretrained(
        folder, local_files_only=True, eos_token="<s>"
    )


def items_of(task: str, *records: dict[str, Any]) -> list[Item]:
    return [TASKS[task].item(Fields(record, "here")) for record in records]


def scores_of(
    blank: tuple[Any, Any], task: str, items: list[Item], device: torch.device
) -> dict[str, float]:
    model, tokenizer = blank
    return score(model, scored_items(TASKS[task], items, tokenizer.encode, 61), False, 4, device)


def test_ties_choose_first_option(blank: tuple[Any, Any], device: torch.device) -> None:
    reviews = items_of("sst2", *({"sentence": "oak", "label": label} for label in (0, 1, 1, 1)))
    shorter = min((0, 1), key=lambda place: len(blank[1].encode(reviews[0].options[place])))
    found = scores_of(blank, "sst2", reviews, device)["acc"]
    assert (found, majority_share(reviews)) == ([1, 3][shorter] / 4, 0.75)
    goals = items_of(
        "piqa", *({"goal": "oak", "sol1": "x", "sol2": "y", "label": label} for label in (0, 1))
    )
    scores = scores_of(blank, "piqa", goals, device)
    assert (scores["acc"], scores["acc_norm"], chance_of_options(goals)) == (0.5, 0.5, 0.5)


def test_its_loss_is_that_of_equal_likelihoods(
    blank: tuple[Any, Any], device: torch.device
) -> None:
    trees = items_of("alpaca", {"instruction": "Name a tree.", "input": "", "output": "oak fir"})
    found = scores_of(blank, "alpaca", trees, device)
    assert found == {"loss": pytest.approx(uniform_loss(blank[0].config.vocab_size), rel=1e-6)}
    assert uniform_loss(blank[0].config.vocab_size) == pytest.approx(math.log(len(blank[1])))


def test_it_writes_nothing(blank: tuple[Any, Any], device: torch.device) -> None:
    """The model always writes token 0, which ends the text."""
    pears, how = (
        items_of("gsm8k", {"question": "Two and two?", "answer": "#### 4"}),
        TASKS["gsm8k"].generation,
    )
    assert how is not None
    texts = generate(*blank, [pears[0].prompt], how, 400, 4, device)
    assert texts == [""]
    assert exact_match(texts, pears, how) == {"strict-match": 0.0, "flexible-extract": 0.0}
