"""Conversations: forms of records, tokens and labels as in TRL, and packed rows."""

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from espalier.data.tasks.catalogue import TASKS
from espalier.data.tasks.chat_encoding import chat_items, chat_sequences
from espalier.data.tasks.encoding import Encoded, Marked
from espalier.data.tasks.fields import Fields
from espalier.data.tasks.item import Item, collate
from espalier.errors import EspalierError
from espalier.hf.opening.opened_model import OpenedModel
from espalier.settings.node import parse_node
from espalier.settings.run import parse
from espalier.settings.tables.task import CHAT_TEMPLATES
from espalier.training.packing import PackedSequences
from espalier.training.sequences import client_sequences, sequence_groups
from tests.tiny_model import save_tiny_llama

SECRET = "hawthorn"
CHATML = CHAT_TEMPLATES["chatml"]
MARKED = (
    "{% for m in messages %}{{ m['role'] + ':' }}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + '|' }}{% endgeneration %}"
    "{% else %}{{ m['content'] + '\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)
CLOSED = CHATML + "{% if not add_generation_prompt %}{{ eos_token }}{% endif %}"
"""Template that closes every text, like Phi-3's."""
FORGETFUL = (
    "{% for m in messages %}[{{ m['role'] }}]{% if m['role'] == 'assistant' and loop.last %}"
    "think {% endif %}{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
"""Template that leaves out what an earlier answer began with, like Qwen3's."""


def item(**record: Any) -> Item:
    return TASKS["chat"].item(Fields(record, "here"))


def talk(number: int, turns: int, system: bool = False) -> list[dict[str, str]]:
    found = [{"role": "system", "content": f"be {number}"}] if system else []
    for turn in range(turns):
        found.append({"role": "user", "content": f"oak {number} {turn}\n"})
        found.append(
            {"role": "assistant", "content": f" elm {turn}" if turn % 2 else f"fir {number}\nash"}
        )
    return found  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("chat") / "model", positions=256)


def with_template(folder: Path, template: str) -> OpenedModel:
    """Return a model whose tokenizer has a template, an end-of-text and a padding token."""
    model = OpenedModel(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder, eos_token="<s>", pad_token="<s>")
    tokenizer.chat_template = template
    model.__dict__["tokenizer"] = tokenizer
    return model


def texts(model: OpenedModel, one: Marked) -> list[str]:
    """Return the text of each stretch with a loss."""
    return [model.tokenizer.decode(list(one.token_ids[start:end])) for start, end in one.spans]


# ----- records ------------------------------------------------------------------------------------


def test_three_forms_of_the_same_conversation() -> None:
    messages = [("user", "oak?"), ("assistant", "elm")]
    rows = [{"role": role, "content": content} for role, content in messages]
    shared = [{"from": "human", "value": "oak?"}, {"from": "gpt", "value": "elm"}]
    parts = [{"type": "text", "text": "oa"}, {"type": "text", "text": "k?"}]
    found = [
        item(messages=rows),
        item(conversations=shared),
        item(prompt=rows[:1], completion=rows[1:]),
        item(messages=[{"role": "user", "content": parts}, rows[1]]),
    ]
    first = {"from": "system", "value": "be kind"}
    with_system = item(conversations=shared, system="be kind").conversation
    assert with_system == item(conversations=[first, *shared]).conversation
    for one in found:
        assert one.conversation is not None
        assert list(one.conversation.messages) == messages
        assert one.text == "user: oak?"
    assert [one.conversation.first for one in found if one.conversation] == [0, 0, 1, 0]


def test_a_form_that_the_columns_name_comes_first() -> None:
    record = {"messages": talk(1, 1), "prompt": "oak?", "a": "elm"}
    columns = {"completion": "a"}
    found = TASKS["chat"].item(Fields(record, "here", columns))
    assert (found.prompt, found.gold) == ("oak?", "elm")
    with_null = [{**message, "weight": None} for message in talk(1, 1)]
    assert item(messages=with_null).conversation == item(messages=talk(1, 1)).conversation


def test_a_greeting_is_a_part_of_the_question() -> None:
    """Otherwise all conversations with the same greeting would have the same hash."""
    before = [{"role": "system", "content": "be kind"}, {"role": "assistant", "content": "hello"}]
    asked = [{"role": "user", "content": "oak?"}]
    answer = [{"role": "assistant", "content": "elm"}]
    told = item(messages=[*before, *asked, *answer])
    assert told.text == "system: be kind\nassistant: hello\nuser: oak?"
    assert told.gold == "assistant: elm"
    in_prompt = item(prompt=[*before, *asked], completion=answer)
    assert (in_prompt.text, in_prompt.gold) == (told.text, told.gold)


@pytest.mark.parametrize(
    ("record", "error"),
    [
        ({"text": SECRET}, "has none of the fields messages,"),
        ({"messages": SECRET}, "field 'messages' is not a list"),
        ({"messages": []}, "not a list with at least one element but an empty one"),
        ({"messages": [SECRET]}, "item 1 is a string"),
        ({"messages": [{"role": "user", "content": SECRET}]}, "has no message of the assistant"),
        ({"messages": [{"role": SECRET, "content": "a"}]}, "element 1, field 'role' is not one of"),
        ({"messages": [{"role": "user"}]}, "element 1 has no field 'content'"),
        ({"messages": [{"role": "user", "content": None}]}, "not a string but null"),
        ({"messages": [{"role": "user", "content": " "}]}, "field 'content' is blank"),
        ({"messages": [{"role": "assistant", "content": SECRET}]}, "begins with the assistant"),
        (
            {"messages": [{"role": "system", "content": "a"}, *reversed(talk(1, 1))]},
            "no message of the assistant after the first one of the user",
        ),
        ({"messages": [*talk(1, 1)[1:], *talk(2, 1)]}, "begins with the assistant"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "field 'type' is not 'text'",
        ),
        (
            {"messages": [{"role": "assistant", "content": "", "tool_calls": [SECRET]}]},
            "is a call of a tool",
        ),
        ({"conversations": [{"from": "human", "value": 3}]}, "field 'value' is not a string"),
        ({"messages": [{"role": "system", "content": None}]}, "not a string but null"),
        ({"messages": [{"role": "user", "content": "a", "weight": 0}]}, "'weight' is not 1"),
        ({"messages": [{"role": "user", "content": "a", "train": False}]}, "'train' is not 1 or"),
        (
            {"messages": [{"role": "assistant", "content": "a", "refusal": "no"}]},
            "'refusal' is a part of the message that is not supported",
        ),
        ({"messages": talk(1, 1), "tools": [SECRET]}, "'tools' is given to a template"),
        ({"prompt": SECRET, "completion": ""}, "field 'completion' is blank"),
        ({"prompt": [{"role": "user", "content": "a"}], "completion": "b"}, "is not a list"),
    ],
)
def test_a_wrong_record_is_refused_without_its_text(record: dict[str, Any], error: str) -> None:
    with pytest.raises(EspalierError, match=error) as caught:
        item(**record)
    assert SECRET not in str(caught.value)
    assert "here" in str(caught.value)


# ----- tokens and labels --------------------------------------------------------------------------


def test_answers_of_several_turns_have_a_loss(folder: Path) -> None:
    model = with_template(folder, CHATML)
    (one,) = chat_sequences(model, item(messages=talk(1, 2, system=True)), None)
    whole = model.tokenizer.decode(list(one.token_ids))
    assert whole == (
        "<|im_start|>system\nbe 1<|im_end|>\n<|im_start|>user\noak 1 0\n<|im_end|>\n"
        "<|im_start|>assistant\nfir 1\nash<|im_end|><s>\n<|im_start|>user\noak 1 1\n<|im_end|>\n"
        "<|im_start|>assistant\n elm 1<|im_end|><s>\n"
    )
    assert texts(model, one) == ["fir 1\nash<|im_end|><s>\n", " elm 1<|im_end|><s>\n"]


def test_only_the_completion_of_a_prompt_has_a_loss(folder: Path) -> None:
    rows = talk(1, 2)
    for template in (CHATML, MARKED):
        model = with_template(folder, template)
        (one,) = chat_sequences(model, item(prompt=rows[:3], completion=rows[3:]), None)
        (text,) = texts(model, one)
        assert text.startswith(" elm 1")


def test_a_template_that_forgets_gives_a_sequence_per_answer(folder: Path) -> None:
    model = with_template(folder, FORGETFUL)
    found = chat_sequences(model, item(messages=talk(1, 2)), None)
    assert [texts(model, one) for one in found] == [["think fir 1\nash"], ["think  elm 1"]]
    assert model.tokenizer.decode(list(found[1].token_ids)) == (
        "[user]oak 1 0\n[assistant]fir 1\nash[user]oak 1 1\n[assistant]think  elm 1"
    )


def test_a_named_template_replaces_a_missing_one(folder: Path) -> None:
    model = OpenedModel(folder)
    with pytest.raises(EspalierError, match=r"no chat template; set task\.chat-template"):
        chat_sequences(model, item(messages=talk(1, 1)), None)
    (one,) = chat_sequences(model, item(messages=talk(1, 1)), CHATML)
    assert texts(model, one) == ["fir 1\nash<|im_end|>\n"]


@pytest.mark.parametrize(
    ("template", "error"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refuses a conversation: roles must"),
        ("{{ messages[9]['content'] + 'a' }}", "refuses a conversation: UndefinedError"),
        ("{{ raise_exception(messages[0]['content']) }}", "conversation: TemplateError"),
        ("{{ messages[0][messages[0]['content']].x }}", "conversation: UndefinedError"),
        ("{{ 1 + messages[0]['content'] }}", r"fails on a conversation \(TypeError\)"),
        (CHATML + "{{ add_generation_prompt }}", "writes an assistant message otherwise"),
        ("{{ messages[0]['content'] }}", "leaves out text of an assistant"),
        ("{% generation %}{% endgeneration %}{{ messages[0]['content'] }}", "leaves out an assist"),
    ],
)  # fmt: skip
def test_a_template_that_fails_is_an_error(folder: Path, template: str, error: str) -> None:
    model = with_template(folder, template)
    with pytest.raises(EspalierError, match=error) as caught:
        chat_sequences(
            model, item(messages=[{"role": "user", "content": SECRET}, *talk(1, 1)[1:]]), None
        )
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    ("template", "answer", "is_kept"),
    [
        ("{{ m['content'].split('</think>')[-1] }}", "An oak.<think>so</think>", False),
        ("{{ m['content'].split('</think>')[-1] }}", "<think>so</think>\n\nAn  oak.\n", True),
        ("{{ m['content'] | trim }}", " yes ", True),
        ("", "yes", False),
    ],
)
@pytest.mark.parametrize("marked", [False, True])
def test_a_template_must_keep_what_an_answer_says(
    folder: Path, template: str, answer: str, is_kept: bool, marked: bool
) -> None:
    """Also if the question contains the answer."""
    if marked:
        template = "{% generation %}" + template + "x{% endgeneration %}"
    model = with_template(
        folder,
        "{% for m in messages %}{% if m['role'] == 'user' %}yes An oak. A:{% else %}"
        + template
        + "\n{% endif %}{% endfor %}",
    )
    turns = [{"role": "user", "content": "yes"}, {"role": "assistant", "content": answer}]
    if is_kept:
        assert chat_sequences(model, item(messages=turns), None)
        return
    with pytest.raises(EspalierError, match="leaves out text of an assistant message"):
        chat_sequences(model, item(messages=turns), None)


@pytest.mark.parametrize("call", ["'%d %b %Y'", "format='%d %b %Y'"])
def test_todays_date_is_not_part_of_the_tokens(folder: Path, call: str) -> None:
    model = with_template(folder, f"{{{{ strftime_now({call}) }}}}" + CHATML)
    (one,) = chat_sequences(model, item(messages=talk(1, 1)), None)
    assert model.tokenizer.decode(list(one.token_ids)).startswith("26 Jul 2024<|im_start|>")


# ----- TRL ----------------------------------------------------------------------------------------


def known_to_trl(name: str) -> str:
    trl = pytest.importorskip("trl")
    return (Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja").read_text()


def in_trl(
    folder: Path, tokenizer: Any, rows: Sequence[dict[str, Any]], **options: Any
) -> list[tuple[list[int], list[int]]]:
    """Return token ids and labels of ``SFTTrainer``."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    settings = SFTConfig(
        output_dir=str(folder / "trl"), use_cpu=True, report_to=[], bf16=False, max_length=None,
        disable_tqdm=True, **options,
    )  # fmt: skip
    trainer = SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder),
        args=settings,
        train_dataset=Dataset.from_list(list(rows)),
        processing_class=tokenizer,
    )
    return [(row["input_ids"], row["labels"]) for row in trainer.train_dataset]


def ours(model: OpenedModel, row: dict[str, Any]) -> tuple[list[int], list[int]]:
    (one,) = chat_sequences(model, item(**row), None)
    batch = collate([one], 0)
    return list(one.token_ids), batch.labels[0].tolist()


def openai(number: int) -> dict[str, Any]:
    return {"messages": talk(number, 1 + number % 3, system=number % 2 == 0)}


def sharegpt(number: int) -> dict[str, Any]:
    rows = talk(number, 2)
    return {"conversations": [{"from": row["role"], "value": row["content"]} for row in rows]}


def prompt_in_messages(number: int) -> dict[str, Any]:
    rows = talk(number, 2, system=number % 2 == 0)
    return {"prompt": rows[:-1], "completion": rows[-1:]}


def prompt_in_text(number: int) -> dict[str, Any]:
    return {"prompt": f"oak {number}" + "\n" * (number % 2), "completion": f" elm{number}"}


@pytest.mark.parametrize("form", [openai, sharegpt, prompt_in_messages, prompt_in_text])
@pytest.mark.parametrize("template", ["llama3", "phi3", "qwen3_instruct_2507", "marked"])
def test_tokens_and_labels_equal_trl(
    folder: Path, form: Callable[[int], dict[str, Any]], template: str
) -> None:
    from trl.data_utils import maybe_convert_to_chatml

    text = MARKED if template == "marked" else known_to_trl(template)
    model = with_template(folder, text)
    rows = [form(number) for number in range(10)]
    turned = [maybe_convert_to_chatml(form(number)) for number in range(10)]
    expected = in_trl(folder, model.tokenizer, turned, assistant_only_loss="messages" in turned[0])
    assert [ours(model, row) for row in rows] == expected


# ----- scores and packing -------------------------------------------------------------------------


def test_the_loss_of_answers_is_that_of_all_labels(folder: Path) -> None:
    """Requests with one answer each have the loss of one pass over the conversation."""
    model = with_template(folder, CHATML)
    one = item(messages=talk(1, 3))
    found = chat_items([one], model, None, 256)
    (sequence,) = chat_sequences(model, one, None)
    assert [request.answer_tokens for request in found.requests] == [
        end - start for start, end in sequence.spans
    ]
    assert [request.token_ids for request in found.requests] == [
        sequence.token_ids[:end] for _, end in sequence.spans
    ]
    assert found.cut == ()
    assert chat_items([one], model, None, 20).cut == (0, 1, 2)


def test_rows_are_packed_best_fit_first() -> None:
    sequences = [Marked(tuple(range(length)), ((0, length),)) for length in (3, 9, 5, 2, 7)]
    rows = PackedSequences(sequences, 10)
    assert [row.lengths for row in rows] == [(9,), (7, 3), (5, 2)]
    assert [row.items for row in rows] == [(1,), (4, 0), (2, 3)]
    # The first token of a record has no loss.
    assert rows[1].spans == ((1, 7), (8, 10))
    batch = collate(rows, 0)
    assert batch.position_ids is not None
    assert batch.position_ids[1].tolist() == [*range(7), *range(3)]
    assert batch.position_ids[2].tolist() == [*range(5), *range(2), *range(3)]
    assert batch.attention_mask.sum().item() == 26


def test_packing_keeps_every_label() -> None:
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(2, 30, (200,), generator=generator).tolist()
    sequences = [Encoded(tuple(range(length)), length // 2) for length in lengths]
    rows = PackedSequences(sequences, 32)
    assert all(len(row.token_ids) <= 32 for row in rows)
    assert sorted(length for row in rows for length in row.lengths) == sorted(lengths)
    before = sum(length // 2 for length in lengths)
    assert sum(end - start for row in rows for start, end in row.spans) == before
    assert len(rows) < 1.1 * sum(lengths) / 32


@pytest.mark.parametrize("packing", [False, True])
def test_groups_of_sequences_are_those_of_their_conversations(
    folder: Path, tmp_path: Path, packing: bool
) -> None:
    """A conversation that is left out, or gives several sequences, does not shift the groups."""
    file = tmp_path / "talks.jsonl"
    rows = [
        {"messages": talk(number, 1 + number % 2), "patient": f"p{number}"} for number in range(30)
    ]
    long = [{"role": "user", "content": "oak " * 400}, {"role": "assistant", "content": "elm"}]
    rows.insert(7, {"messages": long, "patient": "left out"})
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = with_template(folder, FORGETFUL)
    settings = parse({
        "method": "fedpetuning", "task.name": "chat", "task.max-tokens": 200,
        "task.packing": packing,
    })  # fmt: skip
    own = {"data-path": str(file), "data-task": "chat", "data-group": "patient", "min-tokens": 1}
    node = parse_node({"site": "a"} | own)
    (sequences,) = client_sequences(settings, node, model, 0).parts
    groups = sequence_groups(settings, node, model, 0)
    assert len(groups) == len(sequences)
    by_number: dict[str, set[int]] = {}
    for one, own in zip(sequences, groups, strict=True):
        text = model.tokenizer.decode(list(one.token_ids))
        numbers = set(re.findall(r"oak (\d+) \d", text))
        assert len(numbers) == len(own)
        for number in numbers:
            by_number.setdefault(number, set()).update(own)
    assert packing or all(len(found) == 1 for found in by_number.values())
    assert (max(map(len, groups)) > 1) == packing


@pytest.mark.parametrize("ending", ["jsonl", "json"])
def test_a_conversation_that_a_template_refuses_is_named(
    folder: Path, tmp_path: Path, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("espalier.data.passages.HELD_OUT_PERCENT", 0)
    rows = [{"messages": talk(number, 1)} for number in range(30)]
    rows[17]["messages"].insert(0, {"role": "system", "content": SECRET})
    lines = [json.dumps(row) for row in rows]
    file = tmp_path / f"talks.{ending}"
    file.write_text("\n".join(lines) if ending == "jsonl" else f"[{','.join(lines)}]")
    refusing = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    model = with_template(folder, refusing + CHATML)
    settings = parse({"method": "fedpetuning", "task.name": "chat"})
    node = parse_node({"site": "a", "data-path": str(file), "data-task": "chat", "min-tokens": 1})
    first = len("\n".join(lines[:17])) + 2
    where = f"byte {first}" if ending == "jsonl" else "row 18"
    with pytest.raises(
        EspalierError, match=rf"{where} \(task chat\): the chat .* no system"
    ) as caught:
        client_sequences(settings, node, model, 0)
    assert SECRET not in str(caught.value)
    assert where not in caught.value.outward
    assert caught.value.outward != str(caught.value)
