"""Questions with lettered choices: arc-easy, arc-challenge, openbookqa and mmlu.

Prompts and options are those of lm-evaluation-harness 0.4.13 (``arc``, ``openbookqa``,
``mmlu/default``).
"""

from espalier.data.tasks.fields import Fields
from espalier.data.tasks.item import Item
from espalier.data.tasks.task import Hub, Task

LETTERS = ("A", "B", "C", "D")


def _arc(record: Fields) -> Item:
    question, options, answer = _lettered(record, "question")
    return Item((f"Question: {question}\nAnswer:",), options, answer, label=_letter(answer))


def _openbookqa(record: Fields) -> Item:
    question, options, answer = _lettered(record, "question_stem")
    return Item((question,), options, answer, label=_letter(answer))


def _lettered(record: Fields, stem: str) -> tuple[str, tuple[str, ...], int]:
    """Return question, options and index of the correct option; letters can be "1" to "4" too.

    On the hub a record is ``{stem: "...", "choices": {"text": [...], "label": [...]}, "answerKey":
    "..."}``. In the authors' files it is ``{"question": {"stem": "...", "choices": [{"text": "...",
    "label": "..."}]}, "answerKey": "..."}``.
    """
    if record.is_record("question"):
        inner = record.inner("question")
        question = inner.text("stem")
        choices = inner.inners("choices")
        options = tuple(choice.text("text") for choice in choices)
        letters = tuple(choice.text("label") for choice in choices)
    else:
        question = record.text(stem)
        inner = record.inner("choices")
        options = inner.texts("text")
        letters = inner.texts("label")
    key = record.text("answerKey").strip()
    if len(letters) != len(options) or key not in letters:
        raise record.refused(
            "answerKey",
            "is not the label of one of the choices",
            "give it the label of the right choice",
        )
    return question, options, letters.index(key)


def _letter(place: int) -> str:
    return chr(ord("A") + place)


def _mmlu(record: Fields) -> Item:
    """Return the item of a record: ``question``, four ``choices``, ``answer``, ``subject``.

    ``answer`` is 0 to 3 or its letter. ``subject`` is empty in the auxiliary training split.
    """
    question = record.text("question").strip()
    choices = record.texts("choices")
    answer = record.place("answer", LETTERS)
    subject = record.text("subject", may_be_blank=True)
    if len(choices) != len(LETTERS):
        raise record.refused("choices", "does not have four texts", "give it four")
    about = (
        "The following are multiple choice questions (with answers) about"
        f" {subject.replace('_', ' ')}.\n\n"
    )
    lines = [
        question,
        *(f"{letter}. {choice}" for letter, choice in zip(LETTERS, choices, strict=True)),
        "Answer:",
    ]
    return Item(
        ((about if subject else "") + "\n".join(lines),),
        LETTERS,
        answer,
        label=subject,
        question=question,
    )


ARC_SAMPLE = {
    "question": "Which tree loses its leaves in winter?",
    "choices": {"text": ["oak", "pine"], "label": ["A", "B"]},
    "answerKey": "A",
}
TASKS = (
    Task(
        "arc-easy",
        Hub("allenai/ai2_arc", "ARC-Easy", test="test"),
        ("acc", "acc_norm"),
        _arc,
        sample=ARC_SAMPLE,
    ),
    Task(
        "arc-challenge",
        Hub("allenai/ai2_arc", "ARC-Challenge", test="test"),
        ("acc", "acc_norm"),
        _arc,
        sample=ARC_SAMPLE,
    ),
    Task(
        "openbookqa",
        Hub("allenai/openbookqa", "main", test="test"),
        ("acc", "acc_norm"),
        _openbookqa,
        sample={
            "question_stem": "A tree that keeps its needles is",
            "choices": {"text": ["a pine", "an oak"], "label": ["A", "B"]},
            "answerKey": "A",
        },
        other_fields=("question",),
    ),
    Task(
        "mmlu",
        Hub("cais/mmlu", "all", "auxiliary_train", "test"),
        ("acc",),
        _mmlu,
        sample={
            "question": "What do leaves take in?",
            "choices": ["light", "iron", "sand", "oil"],
            "answer": 0,
            "subject": "botany",
        },
    ),
)
