"""Log-likelihoods against a slow loop, one text and one token at a time; accuracies by hand."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from model_of_logits import ModelOfLogits
from tiny_model import save_tiny_llama
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from espalier.corpora.tasks.item import Item
from espalier.evaluation.chance import chance_of_options, majority_share, uniform_loss
from espalier.evaluation.options import option_accuracy, option_log_likelihoods, option_predictions
from espalier.settings.mistakes import Mistake

pytestmark = pytest.mark.usefixtures("tests_on_device")

ITEMS = [
    Item(("oak birch cedar",), ("fir", "elder gorse hazel"), 1),
    Item(("ivy ",), ("oak", "elder", "juniper larch"), 0),
    Item(("maple oak larch fir", "maple"), ("gorse", "gorse"), 0),
    Item(("oak birch cedar",), ("fir", "fix"), 0),
]


@pytest.fixture(scope="module")
def model_and_tokenizer(tmp_path_factory: pytest.TempPathFactory, device: torch.device) -> tuple[Any, Any]:
    folder: Path = save_tiny_llama(tmp_path_factory.mktemp("model"), dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype=torch.float32).eval()
    return model.to(device), AutoTokenizer.from_pretrained(folder, local_files_only=True)


@torch.no_grad()
def slowly(model: Any, tokenizer: Any, context: str, continuation: str, max_tokens: int) -> float:
    whole, given = tokenizer.encode(context + continuation), tokenizer.encode(context.rstrip())
    total = 0.0
    for place in range(len(given), len(whole)):
        seen = whole[max(0, len(whole) - 1 - max_tokens) : place]
        logits = model(input_ids=torch.tensor([seen])).logits[0, -1].tolist()
        total += logits[whole[place]] - math.log(math.fsum(map(math.exp, logits)))
    return total


@pytest.mark.parametrize("max_tokens", [64, 20])
@pytest.mark.parametrize("batch_size", [1, 3, 16])
def test_log_likelihoods_equal_those_of_a_slow_loop(
    model_and_tokenizer: tuple[Any, Any], batch_size: int, max_tokens: int, device: torch.device
) -> None:
    model, tokenizer = model_and_tokenizer
    found = option_log_likelihoods(model, tokenizer.encode, ITEMS, max_tokens, batch_size, device)
    for item, ours in zip(ITEMS, found, strict=True):
        expected = [slowly(model, tokenizer, *request, max_tokens) for request in item.requests]
        assert ours == pytest.approx(expected, abs=1e-4)


def test_options_that_differ_in_their_last_token_go_through_the_model_once(device: torch.device) -> None:
    rows = 0

    def zeros(input_ids: Tensor) -> Tensor:
        nonlocal rows
        rows += len(input_ids)
        return torch.zeros(*input_ids.shape, 200)

    items = [Item(("ab",), ("x", "y", "zz"), 0), Item(("ab",), ("x", "y", "zz"), 1)]
    model = ModelOfLogits(200, zeros)
    found = option_log_likelihoods(model, lambda text: [ord(one) for one in text], items, 20, device=device)
    assert rows == 2
    assert found[0] == found[1] == pytest.approx([-2 * math.log(200), -2 * math.log(200), -3 * math.log(200)])


def test_an_option_longer_than_the_model_is_a_mistake() -> None:
    with pytest.raises(Mistake, match="an answer has 6 tokens, and 5 fit"):
        option_log_likelihoods(None, lambda text: [ord(character) for character in text], [Item(("ab",), ("yyyyy",), 0)], 5)


def test_accuracy_per_option_per_character_and_per_byte() -> None:
    items = [Item(("?",), ("ab", "abcdef"), 0), Item(("?",), ("éé", "eee"), 1), Item(("?",), ("a", "b"), 0)]
    found = [[-4.0, -6.0], [-2.9, -4.0], [-1.0, -1.0]]
    assert option_predictions(items, found, "acc") == [0, 0, 0]
    # Per character -2 and -1; -1.45 and -1.33; per byte the second item has -0.73 and -1.33.
    assert option_predictions(items, found, "acc_norm") == [1, 1, 0]
    assert option_predictions(items, found, "acc_bytes") == [1, 0, 0]
    assert [option_accuracy(items, found, metric) for metric in ("acc", "acc_norm", "acc_bytes")] == [2 / 3, 2 / 3, 1 / 3]


def test_a_model_without_numbers_predicts_nothing() -> None:
    items = [Item(("?",), ("a", "b"), 0)] * 2
    assert option_predictions(items, [[math.nan, -1.0], [-math.inf, -1.0]]) == [-1, 1]
    assert option_accuracy(items, [[math.nan, math.nan], [-1.0, -math.inf]]) == 0.5


def test_levels_of_chance() -> None:
    items = [Item(("?",), ("a", "b"), 1), Item(("?",), ("a", "b", "c", "d"), 1), Item(("?",), ("a", "b"), 0)]
    assert chance_of_options(items) == pytest.approx((0.5 + 0.25 + 0.5) / 3)
    assert majority_share(items) == pytest.approx(2 / 3)
    assert uniform_loss(4096) == pytest.approx(12 * math.log(2))
