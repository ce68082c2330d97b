"""Batches against tensors written by hand."""

from pathlib import Path

import torch
from transformers import AutoTokenizer

from espalier.data.tasks.encoding import Encoded
from espalier.data.tasks.item import Item, collate, text_tokens
from tests.tiny_model import save_tokenizer

LONG = Encoded((5, 6, 7, 8), 2)
SHORT = Encoded((9, 4), 1)


def test_padding_is_on_the_right_and_has_no_label() -> None:
    batch = collate([LONG, SHORT], 3)
    assert batch.input_ids.tolist() == [[5, 6, 7, 8], [9, 4, 3, 3]]
    assert batch.attention_mask.tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]
    assert batch.labels.tolist() == [[-100, -100, 7, 8], [-100, 4, -100, -100]]
    assert batch.labels.dtype == batch.input_ids.dtype == batch.attention_mask.dtype == torch.int64


def test_an_encoder_gets_texts_and_pairs(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path, pad_token="<s>")
    pair = Item(("?",), ("no", "yes"), 1, texts=("oak", "fir"))
    first = [*tokenizer.encode("oak"), *tokenizer.encode("fir")]
    assert list(text_tokens(pair, tokenizer, 8)) == first
    single = Item(("?",), ("no", "yes"), 1, texts=("oak",))
    assert list(text_tokens(single, tokenizer, 8)) == tokenizer.encode("oak")
    long = Item(("?",), ("no", "yes"), 0, texts=("elm", "x" * 99))
    # The longer text is cut.
    elm = tokenizer.encode("elm")
    cut = [*elm, *tokenizer.encode("x" * 99)][:8]
    assert list(text_tokens(long, tokenizer, 8)) == cut
