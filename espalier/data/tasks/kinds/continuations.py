"""Tasks with a choice of continuations: piqa, hellaswag and winogrande.

Prompts and options are those of lm-evaluation-harness 0.4.13 (``piqa``, ``hellaswag``,
``winogrande``).
"""

import re

from espalier.data.tasks.fields import Fields
from espalier.data.tasks.item import Item
from espalier.data.tasks.task import Hub, Task

_BRACKETS = re.compile(r"\[.*?\]")


def _piqa(record: Fields) -> Item:
    """Return the item of a record: ``goal``, ``sol1``, ``sol2``; ``label``: 0 or 1."""
    answer = record.place("label", ("sol1", "sol2"))
    options = (record.text("sol1"), record.text("sol2"))
    return Item((f"Question: {record.text('goal')}\nAnswer:",), options, answer, label=str(answer))


def _hellaswag(record: Fields) -> Item:
    """Return the item of a record.

    Its fields are ``activity_label``, ``ctx_a``, ``ctx_b``, four ``endings``, and ``label``: 0 to
    3. A file can have ``ctx`` in place of ``ctx_a`` and ``ctx_b``. The harness capitalizes the
    first letter of ``ctx_b`` and writes the others in lower case. The beginning of ``ctx_b`` within
    ``ctx`` is unknown, so ``ctx`` is not changed.
    """
    activity = record.text("activity_label")
    endings = record.texts("endings")
    answer = record.place("label", ("first", "second", "third", "fourth"))
    if len(endings) != 4:
        raise record.refused("endings", "does not have four texts", "give it four")
    if "ctx_a" in record:
        second = record.text("ctx_b", may_be_blank=True)
        context = f"{record.text('ctx_a')} {second.capitalize()}"
    else:
        context = record.text("ctx")
    options = tuple(_without_markup(ending) for ending in endings)
    return Item((_without_markup(f"{activity}: {context}"),), options, answer, label=activity)


def _without_markup(text: str) -> str:
    """Remove markup as ``preprocess`` of the harness does; the brackets come from WikiHow pages."""
    return _BRACKETS.sub("", text.strip().replace(" [title]", ". ")).replace("  ", " ")


def _winogrande(record: Fields) -> Item:
    """Return the item of a record: ``sentence`` with a gap ``_``, ``option1``, ``option2``.

    ``answer`` is "1" or "2". The item is scored by partial evaluation (Trinh and Le 2018): an
    option fills the gap in the context, and both options have the text after the gap as
    continuation.
    """
    sentence = record.text("sentence")
    answer = record.place("answer", ("option1", "option2"), first=1)
    before, gap, after = sentence.partition("_")
    if not gap or not after.strip():
        raise record.refused(
            "sentence", "has no gap '_' with text after it", "mark the gap, or remove the record"
        )
    contexts = tuple(before + record.text(option) for option in ("option1", "option2"))
    return Item(contexts, (after.strip(),) * 2, answer, label=str(answer + 1), question=sentence)


TASKS = (
    Task(
        "piqa",
        Hub("baber/piqa", test="validation"),
        ("acc", "acc_norm"),
        _piqa,
        values="label: 0 if sol1 is right, 1 if sol2 is",
        sample={
            "goal": "Dry a wet boot.",
            "sol1": "Stuff it with paper.",
            "sol2": "Fill it with water.",
            "label": 0,
        },
    ),
    Task(
        "hellaswag",
        Hub("Rowan/hellaswag", test="validation"),
        ("acc", "acc_norm"),
        _hellaswag,
        values="label: number of the right ending, from 0; ctx may replace ctx_a and ctx_b",
        sample={
            "activity_label": "Gardening",
            "ctx_a": "A man plants a tree.",
            "ctx_b": "he",
            "endings": ["waters it.", "eats it.", "sails away.", "falls up."],
            "label": 0,
        },
        other_fields=("ctx",),
    ),
    Task(
        "winogrande",
        Hub("allenai/winogrande", "winogrande_xl", test="validation"),
        ("acc",),
        _winogrande,
        values="answer: 1 if option1 is right, 2 if option2 is",
        sample={
            "sentence": "The oak shaded the bench because the _ was large.",
            "option1": "oak",
            "option2": "bench",
            "answer": "1",
        },
    ),
)
