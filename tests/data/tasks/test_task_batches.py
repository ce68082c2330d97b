"""Batches against tensors written by hand."""

from pathlib import Path

import torch
from transformers import AutoTokenizer

from espalier.data.tasks.encoding import Encoded
from espalier.data.tasks.item import Item, collate, collate_texts
from tests.tiny_model import save_tokenizer

LONG = Encoded((5, 6, 7, 8), 2)
SHORT = Encoded((9, 4), 1)


def test_padding_is_on_the_right_and_has_no_label() -> None:
    batch = collate([LONG, SHORT], 3)
    assert batch.input_ids.tolist() == [[5, 6, 7, 8], [9, 4, 3, 3]]
    assert batch.attention_mask.tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]
    assert batch.labels.tolist() == [[-100, -100, 7, 8], [-100, 4, -100, -100]]
    assert batch.labels.dtype == batch.input_ids.dtype == batch.attention_mask.dtype == torch.int64


def test_an_encoder_gets_pairs_and_classes(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path, pad_token="<s>")
    items = [
        Item(("?",), ("no", "yes"), answer, texts=texts)
        for answer, texts in ((1, ("oak", "fir")), (0, ("elm", "x" * 9)))
    ]
    batch = collate_texts(items, tokenizer, 8)
    first = [*tokenizer.encode("oak"), *tokenizer.encode("fir")]
    assert batch.input_ids[0].tolist() == first + [tokenizer.pad_token_id] * (8 - len(first))
    assert batch.attention_mask[0].tolist() == [1] * len(first) + [0] * (8 - len(first))
    assert batch.input_ids.shape == (2, 8)
    assert batch.labels.tolist() == [1, 0]
    single = collate_texts([Item(("?",), ("no", "yes"), 1, texts=("oak",))], tokenizer, 8)
    assert single.input_ids.tolist() == [tokenizer.encode("oak")]
