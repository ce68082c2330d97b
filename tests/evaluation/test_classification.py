"""Accuracy of an encoder whose logits are known."""

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny_model import save_tokenizer
from torch import Tensor
from transformers import AutoTokenizer

from espalier.corpora.tasks.item import Item
from espalier.evaluation.classification import class_accuracy

pytestmark = pytest.mark.usefixtures("tests_on_device")


def item(text: str, answer: int) -> Item:
    return Item(("?",), ("short", "long"), answer, texts=(text,))


@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_the_share_of_items_whose_class_is_named(batch_size: int, tmp_path: Path, device: torch.device) -> None:
    """The model calls a text long if it has more than six tokens; padding must not count."""

    def model(input_ids: Tensor, attention_mask: Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=torch.stack([torch.full((len(input_ids),), 6.0), attention_mask.sum(1)], dim=1))

    save_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path, pad_token="<s>")
    items = [item("x" * length, answer) for length, answer in ((3, 0), (20, 1), (4, 1), (9, 0), (6, 0))]
    assert class_accuracy(model, tokenizer, items, 32, batch_size, device) == 3 / 5
    assert class_accuracy(model, tokenizer, items, 5, batch_size, device) == 3 / 5
    assert class_accuracy(model, tokenizer, items[:3], 5, batch_size, device) == 1 / 3


def test_a_model_without_numbers_is_never_right(tmp_path: Path, device: torch.device) -> None:
    save_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path, pad_token="<s>")
    broken = SimpleNamespace(logits=torch.tensor([[math.nan, 0.0]]))
    assert class_accuracy(lambda **_: broken, tokenizer, [item("x", 0)], 8, device=device) == 0.0
