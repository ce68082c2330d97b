"""Classification tasks: sst2, mnli and boolq.

Language models are scored by options, encoders by classes. Prompts and options are those of
lm-evaluation-harness 0.4.13 (``glue/sst2``, ``glue/mnli``, ``super_glue/boolq``).
"""

from espalier.data.tasks.fields import Fields
from espalier.data.tasks.item import Item
from espalier.data.tasks.task import Hub, Task

SENTIMENTS = ("negative", "positive")
ENTAILMENTS = ("entailment", "neutral", "contradiction")
TRUTHS = ("no", "yes")


def _sst2(record: Fields) -> Item:
    """Return the item of a record: ``sentence``; ``label``: 0 or 1."""
    sentence = record.text("sentence")
    label = record.place("label", SENTIMENTS)
    prompt = f"{sentence}\nQuestion: Is this sentence positive or negative?\nAnswer:"
    return Item((prompt,), SENTIMENTS, label, label=SENTIMENTS[label], texts=(sentence,))


def _mnli(record: Fields) -> Item:
    """Return the item of a record: ``premise``, ``hypothesis``; ``label``: 0 to 2, or its name."""
    premise = record.text("premise")
    hypothesis = record.text("hypothesis")
    label = record.place("label", ENTAILMENTS)
    claim = hypothesis.strip().removesuffix(".") + "."
    prompt = f"{premise}\nQuestion: {claim} True, False or Neither?\nAnswer:"
    return Item(
        (prompt,),
        # The options are in the order of ``ENTAILMENTS``; the prompt names them in another order.
        ("True", "Neither", "False"),
        label,
        label=ENTAILMENTS[label],
        texts=(premise, hypothesis),
    )


def _boolq(record: Fields) -> Item:
    """Return the item of a record: ``passage``, ``question`` without a question mark.

    The label is ``answer``: true or false, or SuperGLUE's ``label``: 0 or 1.
    """
    passage = record.text("passage")
    question = record.text("question")
    field = "answer" if "answer" in record and not record.is_mapped("label") else "label"
    label = record.place(field, TRUTHS)
    prompt = f"{passage}\nQuestion: {question}?\nAnswer:"
    return Item((prompt,), TRUTHS, label, label=TRUTHS[label], texts=(question, passage))


TASKS = (
    Task(
        "sst2",
        Hub("nyu-mll/glue", "sst2", test="validation"),
        ("acc",),
        _sst2,
        SENTIMENTS,
        values="label: 0 or negative, 1 or positive",
        sample={"sentence": "a gorgeous, witty, seductive movie", "label": 1},
    ),
    Task(
        "mnli",
        Hub("nyu-mll/glue", "mnli", test="validation_matched"),
        ("acc",),
        _mnli,
        ENTAILMENTS,
        values="label: 0 or entailment, 1 or neutral, 2 or contradiction",
        sample={
            "premise": "The river rose overnight.",
            "hypothesis": "The water is higher.",
            "label": 0,
        },
    ),
    Task(
        "boolq",
        Hub("aps/super_glue", "boolq", test="validation"),
        ("acc",),
        _boolq,
        TRUTHS,
        values="answer: true or false; or label: 0 for no, 1 for yes",
        sample={"passage": "Oak is a hardwood.", "question": "is oak a softwood", "answer": False},
        other_fields=("label",),
    ),
)
