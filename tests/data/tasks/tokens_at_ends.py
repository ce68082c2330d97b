"""Byte-level tokenizers that add a start token, an end token, both or none to a text.

Each kind exists with and without a prefix space.
"""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

START = 0
END = 1
SPECIAL = ["<s>", "</s>"]
KINDS = list(itertools.product((False, True), repeat=3))
"""All combinations of start token, end token and prefix space."""
WORDS = (
    "the quiet harbour of a copper engine: Question Answer positive negative True False 42 ten's"
)


def raw_tokenizer(prefix_space: bool) -> Tokenizer:
    """Return a byte-level BPE tokenizer that adds no tokens."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=340, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False
    )
    made.train_from_iterator([f"{WORDS} " * 3], trainer)
    return made


def tokenizer_adding(start: bool, end: bool, prefix_space: bool) -> PreTrainedTokenizerFast:
    """Return the tokenizer as transformers loads it.

    Its post-processor adds the start and end tokens.
    """
    made = raw_tokenizer(prefix_space)
    template = " ".join(["<s>"] * start + ["$A"] + ["</s>"] * end)
    if start or end:
        made.post_processor = processors.TemplateProcessing(
            template, special_tokens=[("<s>", START), ("</s>", END)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )


def save_tokenizer_adding(folder: Path, start: bool, end: bool, prefix_space: bool) -> None:
    """Replace the tokenizer of the model in ``folder``."""
    tokenizer_adding(start, end, prefix_space).save_pretrained(folder)


def split_slowly(
    made: Tokenizer, start: bool, context: str, continuation: str
) -> tuple[list[int], list[int]]:
    """Split context and continuation as lm-evaluation-harness does, without an end token.

    Return the tokens of both. Whitespace at the end of the context moves to the continuation, one
    character at a time.
    """
    while context and context[-1].isspace():
        context, continuation = context[:-1], context[-1] + continuation
    first = [START] if start else []
    whole: Sequence[Any] = first + made.encode(context + continuation, add_special_tokens=False).ids
    alone = len(first + made.encode(context, add_special_tokens=False).ids)
    return list(whole[:alone]), list(whole[alone:])
