"""Prompts and options of every task, written by hand from records in both forms."""

from typing import Any

import pytest

from espalier.data.tasks.catalogue import TASKS, task_named
from espalier.data.tasks.fields import Fields
from espalier.data.tasks.item import Item
from espalier.errors import EspalierError


def item(task: str, **record: Any) -> Item:
    return TASKS[task].item(Fields(record, "file: line 1"))


def test_sst2() -> None:
    found = item("sst2", sentence="a hedge of quiet charm . ", label=1)
    assert found.requests == (
        (
            "a hedge of quiet charm . \nQuestion: Is this sentence positive or negative?\nAnswer:",
            " negative",
        ),
        (
            "a hedge of quiet charm . \nQuestion: Is this sentence positive or negative?\nAnswer:",
            " positive",
        ),
    )
    assert (found.answer, found.label, found.texts) == (
        1,
        "positive",
        ("a hedge of quiet charm . ",),
    )


@pytest.mark.parametrize("label", [2, "contradiction", "2"])
@pytest.mark.parametrize("hypothesis", ["The oak fell ", "The oak fell."])
def test_mnli(label: int | str, hypothesis: str) -> None:
    found = item("mnli", premise="The oak stands.", hypothesis=hypothesis, label=label)
    assert found.contexts == (
        "The oak stands.\nQuestion: The oak fell. True, False or Neither?\nAnswer:",
    )
    assert found.options == ("True", "Neither", "False")
    assert (found.answer, found.label, found.texts) == (
        2,
        "contradiction",
        ("The oak stands.", hypothesis),
    )


@pytest.mark.parametrize("answer", [{"answer": True}, {"answer": "True"}, {"label": 1}])
def test_boolq(answer: dict[str, Any]) -> None:
    found = item("boolq", passage="Ash is a tree.", question="is ash a tree", **answer)
    assert found.contexts == ("Ash is a tree.\nQuestion: is ash a tree?\nAnswer:",)
    assert (found.options, found.gold, found.texts) == (
        ("no", "yes"),
        "yes",
        ("is ash a tree", "Ash is a tree."),
    )


@pytest.mark.parametrize("letters", ["ABC", "123"])
@pytest.mark.parametrize("task", ["arc-easy", "arc-challenge"])
def test_arc_in_the_authors_form_and_in_the_hubs(task: str, letters: str) -> None:
    texts = ["moss", "lichen", "fern"]
    inner = [{"text": text, "label": letter} for text, letter in zip(texts, letters, strict=True)]
    for found in (
        item(task, question={"stem": "What grows?", "choices": inner}, answerKey=letters[1]),
        item(
            task,
            question="What grows?",
            choices={"text": texts, "label": list(letters)},
            answerKey=letters[1],
        ),
    ):
        assert found.requests == tuple(
            ("Question: What grows?\nAnswer:", f" {text}") for text in texts
        )
        assert (found.answer, found.label) == (1, "B")


def test_openbookqa_asks_with_the_bare_stem() -> None:
    choices = {"text": ["bark", "root"], "label": ["A", "B"]}
    found = item("openbookqa", question_stem="Water enters by the", choices=choices, answerKey=" B")
    assert found.requests == (("Water enters by the", " bark"), ("Water enters by the", " root"))
    assert found.answer == 1


@pytest.mark.parametrize("answer", [3, "D"])
def test_mmlu(answer: int | str) -> None:
    found = item(
        "mmlu",
        question=" Which? ",
        choices=["p", "q", "r", "s"],
        answer=answer,
        subject="high_school_botany",
    )
    assert found.contexts == (
        (
            "The following are multiple choice questions (with answers) about high school"
            " botany.\n\nWhich?\nA. p\nB. q\nC. r\nD. s\nAnswer:"
        ),
    )
    assert (found.options, found.answer, found.label) == (
        ("A", "B", "C", "D"),
        3,
        "high_school_botany",
    )
    assert item(
        "mmlu", question="Q", choices=["p", "q", "r", "s"], answer=0, subject=""
    ).prompt.startswith("Q\nA. p")


def test_option_order_makes_no_other_question() -> None:
    questions = [
        item("mmlu", question="Q", choices=list(choices), answer=0, subject="s")
        for choices in ("pqrs", "srqp")
    ]
    gaps = [
        item("winogrande", sentence="a _ b", option1=one, option2=other, answer="1")
        for one, other in (("x", "y"), ("y", "x"))
    ]
    for first, second in (questions, gaps):
        assert first.contexts != second.contexts
        assert first.text == second.text


def test_piqa() -> None:
    found = item("piqa", goal="To prune", sol1="use shears", sol2="use a spoon", label=0)
    assert found.requests == (
        ("Question: To prune\nAnswer:", " use shears"),
        ("Question: To prune\nAnswer:", " use a spoon"),
    )
    assert found.gold == "use shears"


def test_hellaswag_removes_markup_and_capitalises() -> None:
    endings = [
        " [substeps] cuts it. ",
        "waits  a while.",
        "goes [x] home",
        "sleeps [title] soundly",
    ]
    rest: dict[str, Any] = {"activity_label": "Pruning", "endings": endings, "label": "3"}
    found = item("hellaswag", ctx_a="A man kneels. [step] Slowly", ctx_b="he LOOKS", **rest)
    assert found.contexts == ("Pruning: A man kneels. Slowly He looks",)
    assert found.options == (" cuts it.", "waits a while.", "goes home", "sleeps. soundly")
    assert (found.answer, found.label) == (3, "Pruning")
    assert item("hellaswag", ctx="A man. he", **rest).prompt == "Pruning: A man. he"


def test_winogrande_fills_the_gap_in_the_context() -> None:
    sentence = "The vine climbs the wall because the _ is strong."
    found = item("winogrande", sentence=sentence, option1="vine", option2="wall", answer="2")
    assert found.requests == (
        ("The vine climbs the wall because the vine", " is strong."),
        ("The vine climbs the wall because the wall", " is strong."),
    )
    assert (found.answer, found.prompt) == (1, "The vine climbs the wall because the wall")


def test_gsm8k() -> None:
    found = item("gsm8k", question="Two and two pears?", answer="2+2=4\n#### 4")
    assert found.requests == (("Question: Two and two pears?\nAnswer:", " 2+2=4\n#### 4"),)
    assert found.label == ""


@pytest.mark.parametrize(
    ("task", "given", "answer"), [("dolly", "context", "response"), ("alpaca", "input", "output")]
)
def test_instructions_with_and_without_an_input(task: str, given: str, answer: str) -> None:
    rest = {answer: "Roses.", "category": "open_qa"}
    found = item(task, instruction="Name a flower.", **{given: ""}, **rest)
    assert (
        "".join(found.requests[0])
        == "Below is an instruction that describes a task. Write a response that appropriately"
        " completes the request.\n\n### Instruction:\nName a flower.\n\n### Response:\nRoses."
    )
    found = item(task, instruction="Name a flower.", **{given: "It is red."}, **rest)
    assert (
        "".join(found.requests[0])
        == "Below is an instruction that describes a task, paired with an input that provides"
        " further context. Write a response that appropriately completes the request.\n\n###"
        " Instruction:\nName a flower.\n\n### Input:\nIt is red.\n\n### Response:\nRoses."
    )
    assert found.label == ("open_qa" if task == "dolly" else "")


def test_an_unknown_task_is_a_mistake() -> None:
    assert task_named("sst2").classes == ("negative", "positive")
    with pytest.raises(EspalierError, match="task: 'sst3' is unknown; choose one of sst2, mnli"):
        task_named("sst3")
