"""Tokens that a tokenizer appends to a text do not change the model's input for a task."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from espalier.data import token_pieces
from espalier.data.client_items import as_tests
from espalier.data.tasks.catalogue import TASKS
from espalier.data.tasks.encoding import added_behind, prompt_encoder
from espalier.data.tasks.fields import Fields
from espalier.data.tasks.item import Item
from espalier.data.token_pieces import TokenPieces
from espalier.errors import EspalierError
from espalier.hf.opening.opened_model import OpenedModel
from espalier.settings.run import parse
from tests.data.tasks.task_records import RECORDS
from tests.data.tasks.tokens_at_ends import (
    END,
    KINDS,
    START,
    raw_tokenizer,
    save_tokenizer_adding,
    split_slowly,
    tokenizer_adding,
)
from tests.tiny_model import save_tiny_llama


def item_of(task: str) -> Item:
    return TASKS[task].item(Fields(RECORDS.get(task, TASKS[task].sample), "here"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("task", sorted({*TASKS} - {"chat"}))
def test_options_are_split_as_by_a_slow_reference(task: str, kind: tuple[bool, bool, bool]) -> None:
    start, _, prefix_space = kind
    own = {"data.prompt": "{question}\n", "data.labels": "no,yes"}
    settings = parse({"method": "fedpetuning", "task.name": task, "data.path": "unused"} | own)
    item = item_of(task)
    made = raw_tokenizer(prefix_space)
    decoder = SimpleNamespace(kind="decoder")
    model = SimpleNamespace(tokenizer=tokenizer_adding(*kind), family=decoder, num_positions=None)
    found = as_tests(settings, [item], model)
    assert len(found.requests) == len(item.options)
    for one, (context, continuation) in zip(found.requests, item.requests, strict=True):
        before, answer = split_slowly(made, start, context, continuation)
        assert list(one.token_ids) == before + answer
        assert one.answer_tokens == len(answer)
        # Blank space at the end of a prompt is scored with the answer.
        assert made.decode(answer) == context[len(context.rstrip()) :] + continuation
        assert END not in one.token_ids


@pytest.mark.parametrize(("start", "end", "prefix_space"), KINDS)
def test_a_prompt_keeps_what_stands_before_it(start: bool, end: bool, prefix_space: bool) -> None:
    tokenizer = tokenizer_adding(start, end, prefix_space)
    made = raw_tokenizer(prefix_space)
    assert added_behind(tokenizer) == ((END,) if end else ())
    encode = prompt_encoder(tokenizer)
    for text in ("the quiet harbour", "", " ", "ends in </s>", "</s>", "<s>", "a"):
        assert (
            list(encode(text)) == [START] * start + made.encode(text, add_special_tokens=False).ids
        )


def test_a_tokenizer_whose_start_is_its_end() -> None:
    made = raw_tokenizer(False)
    made.post_processor = processors.TemplateProcessing(
        "</s> $A </s> </s>", special_tokens=[("</s>", END)]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>")
    assert added_behind(tokenizer) == (END, END)
    assert list(prompt_encoder(tokenizer)("a")) == [
        END,
        *made.encode("a", add_special_tokens=False).ids,
    ]


def test_a_vocabulary_without_the_usual_letters() -> None:
    """Unknown letters give no token, or the token that also ends a text."""
    for unknown in (None, "</s>"):
        made = Tokenizer(
            models.WordLevel({"<s>": 0, "</s>": 1, "oak": 2}, unk_token=unknown or "none")
        )
        if unknown is None:
            made = Tokenizer(models.BPE({"<s>": 0, "</s>": 1, "k": 2}, []))
        made.pre_tokenizer = pre_tokenizers.Whitespace()
        made.post_processor = processors.TemplateProcessing(
            "$A </s>", special_tokens=[("</s>", END)]
        )
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=made, bos_token="<s>", eos_token="</s>"
        )
        assert added_behind(tokenizer) == (END,)


def test_tokenizer_hiding_additions_is_refused() -> None:
    class Mixing:
        all_special_ids: tuple[int, ...] = ()

        def __len__(self) -> int:
            return 3

        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            return [1, 0, 2] if add_special_tokens else [1, 2]

        def decode(self, numbers: list[int]) -> str:
            return str(numbers)

    with pytest.raises(EspalierError, match="adds to the end of a text cannot be determined"):
        added_behind(Mixing())


def test_model_caches_requested_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tokenizer_adding(save_tiny_llama(tmp_path), True, True, False)
    model = OpenedModel(tmp_path)
    encode = prompt_encoder(model.tokenizer, model.encode)
    asked = list[Any]()
    once = list(encode("quiet harbour"))
    monkeypatch.setattr(
        model.tokenizer, "_encode_plus", lambda *given, **named: asked.append(given)
    )
    assert (list(encode("quiet harbour")), asked) == (once, [])


@pytest.mark.parametrize("kind", KINDS)
def test_additions_to_plain_text_occur_once(
    kind: tuple[bool, bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    start, end, prefix_space = kind
    passages = [f"the quiet harbour {number}\n of a copper engine: ten's" for number in range(60)]
    whole = raw_tokenizer(prefix_space).encode("\n\n".join(passages), add_special_tokens=False).ids
    expected = [START] * start + whole + [END] * end
    tokenizer = tokenizer_adding(*kind)
    longest = [0]

    def encode(text: str) -> list[int]:
        longest[0] = max(longest[0], len(text))
        return list(tokenizer.encode(text))

    for size in (1 << 19, 700, 300):
        monkeypatch.setattr(token_pieces, "PIECE_CHARACTERS", size)
        longest[0] = 0
        found = TokenPieces(passages, encode)
        assert found.all().tolist() == expected
        assert found.spans([len(expected) - 9, 100], 9).tolist() == [
            expected[-9:],
            expected[100:109],
        ]
        # The text was cut into pieces.
        assert longest[0] < 2 * size + 500
