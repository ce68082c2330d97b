"""Log-likelihoods of options as runs encode them, against a slow loop over texts and tokens."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from espalier.data.tasks.catalogue import task_named
from espalier.data.tasks.item import Item
from espalier.data.tasks.scored_items import scored_items
from espalier.errors import EspalierError
from espalier.evaluation.scores import log_likelihoods
from tests.evaluation.model_of_logits import ModelOfLogits
from tests.tiny_model import save_tiny_llama

pytestmark = pytest.mark.usefixtures("tests_on_device")

CHOICE = task_named("piqa")
ITEMS = [
    Item(("oak birch cedar",), ("fir", "elder gorse hazel"), 1),
    Item(("ivy ",), ("oak", "elder", "juniper larch"), 0),
    Item(("maple oak larch fir", "maple"), ("gorse", "gorse"), 0),
    Item(("oak birch cedar",), ("fir", "fix"), 0),
]


def by_character(text: str) -> list[int]:
    return [ord(character) for character in text]


@pytest.fixture(scope="module")
def model_and_tokenizer(
    tmp_path_factory: pytest.TempPathFactory, device: torch.device
) -> tuple[Any, Any]:
    folder: Path = save_tiny_llama(tmp_path_factory.mktemp("model"), dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(
        folder, local_files_only=True, dtype=torch.float32
    ).eval()
    return model.to(device), AutoTokenizer.from_pretrained(folder, local_files_only=True)


@torch.no_grad()
def slowly(model: Any, tokenizer: Any, context: str, continuation: str, max_tokens: int) -> float:
    """Return the log-likelihood of the continuation after at most ``max_tokens`` tokens."""
    whole = tokenizer.encode(context + continuation)
    given = tokenizer.encode(context.rstrip())
    total = 0.0
    for place in range(len(given), len(whole)):
        seen = whole[max(0, len(whole) - 1 - max_tokens) : place]
        logits = model(input_ids=torch.tensor([seen])).logits[0, -1].tolist()
        total += logits[whole[place]] - math.log(math.fsum(map(math.exp, logits)))
    return total


@pytest.mark.parametrize("max_tokens", [64, 8])
@pytest.mark.parametrize("batch_size", [1, 3, 16])
def test_log_likelihoods_equal_slow_loop(
    model_and_tokenizer: tuple[Any, Any], batch_size: int, max_tokens: int, device: torch.device
) -> None:
    """Items that are too long are cut on the left."""
    model, tokenizer = model_and_tokenizer
    tests = scored_items(CHOICE, ITEMS, tokenizer.encode, max_tokens + 1)
    assert bool(tests.cut) == (max_tokens == 8)
    found = log_likelihoods(model, tests.requests, batch_size, device)
    for item, options in zip(ITEMS, tests.options(), strict=True):
        expected = [slowly(model, tokenizer, *request, max_tokens) for request in item.requests]
        assert [found[one] for one in options] == pytest.approx(expected, abs=1e-4)


def test_common_prefix_is_computed_once(
    device: torch.device,
) -> None:
    rows = 0

    def zeros(input_ids: Tensor) -> Tensor:
        nonlocal rows
        rows += len(input_ids)
        return torch.zeros(*input_ids.shape, 200)

    items = [Item(("ab",), ("x", "y", "zz"), 0), Item(("ab",), ("x", "y", "zz"), 1)]
    tests = scored_items(CHOICE, items, by_character, 20)
    found = log_likelihoods(ModelOfLogits(200, zeros), tests.requests, 16, device)
    assert rows == 2
    for options in tests.options():
        expected = [-2 * math.log(200), -2 * math.log(200), -3 * math.log(200)]
        assert [found[one] for one in options] == pytest.approx(expected)


def test_option_longer_than_model_is_refused() -> None:
    with pytest.raises(
        EspalierError,
        match=r"an answer has 6 tokens, but only 5 fit .* raise task\.max-test-tokens",
    ):
        scored_items(CHOICE, [Item(("ab",), ("yyyyy",), 0)], by_character, 6)
