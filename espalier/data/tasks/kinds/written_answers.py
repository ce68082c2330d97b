"""Tasks with written answers: gsm8k by exact match, dolly and alpaca by the loss on the answer.

Prompt, patterns and stop strings of gsm8k are those of lm-evaluation-harness 0.4.13 (``gsm8k``),
without its five examples.
"""

import re

from espalier.data.tasks.fields import Fields
from espalier.data.tasks.item import Item
from espalier.data.tasks.task import Generation, Hub, Task

_RESULT = re.compile(r"#### -?[0-9.,]")

NUMBERS = Generation(
    stop=("Question:", "</s>", "<|im_end|>"),
    patterns=(
        ("strict-match", re.compile(r"#### (\-?[0-9\.\,]+)"), 0),
        ("flexible-extract", re.compile(r"(-?[$0-9.,]{2,})|(-?[0-9]+)"), -1),
    ),
    ignored=(re.compile(","), re.compile(r"\$"), re.compile("(?s).*#### "), re.compile(r"\.$")),
)


def _gsm8k(record: Fields) -> Item:
    """Return the item of a record: ``question``; ``answer``: the steps and "#### number".

    Records have no label.
    """
    answer = record.text("answer")
    if not _RESULT.search(answer):
        raise record.refused(
            "answer", "does not end with '#### ' and a number", "add them, or remove the record"
        )
    return Item((f"Question: {record.text('question')}\nAnswer:",), (answer,), 0)


def _dolly(record: Fields) -> Item:
    """Return the item of a record: ``instruction``, ``context``, ``response``; ``category``.

    ``context`` and ``category`` can be empty or missing.
    """
    context = record.text("context", may_be_blank=True, optional=True)
    category = record.text("category", may_be_blank=True, optional=True)
    prompt = _instruction(record.text("instruction"), context)
    return Item((prompt,), (record.text("response"),), 0, "\n", label=category)


def _alpaca(record: Fields) -> Item:
    """Return the item of a record: ``instruction``, ``input``, ``output``; records have no label.

    ``input`` can be empty or missing.
    """
    given = record.text("input", may_be_blank=True, optional=True)
    prompt = _instruction(record.text("instruction"), given)
    return Item((prompt,), (record.text("output"),), 0, "\n")


def _instruction(instruction: str, given: str) -> str:
    """Return the prompt of Stanford Alpaca (Taori et al. 2023).

    The answer follows on a line of its own, as in Alpaca-LoRA.
    """
    if given.strip():
        return (
            "Below is an instruction that describes a task, paired with an input that provides"
            " further context. Write a response that appropriately completes the request.\n\n###"
            f" Instruction:\n{instruction}\n\n### Input:\n{given}\n\n### Response:"
        )
    return (
        "Below is an instruction that describes a task. Write a response that appropriately"
        f" completes the request.\n\n### Instruction:\n{instruction}\n\n### Response:"
    )


TASKS = (
    Task(
        "gsm8k",
        Hub("openai/gsm8k", "main", test="test"),
        ("exact_match", "loss"),
        _gsm8k,
        generation=NUMBERS,
        sample={
            "question": "Two trees bear 3 pears each. How many pears?",
            "answer": "2 * 3 = 6\n#### 6",
        },
    ),
    Task(
        "dolly",
        Hub("databricks/databricks-dolly-15k"),
        ("loss",),
        _dolly,
        values="context and category may be empty or missing; category is only read to distribute"
        " records",
        sample={
            "instruction": "Name a hardwood.",
            "context": "",
            "response": "Oak.",
            "category": "open_qa",
        },
    ),
    Task(
        "alpaca",
        Hub("tatsu-lab/alpaca"),
        ("loss",),
        _alpaca,
        values="input may be empty or missing",
        sample={"instruction": "Name a hardwood.", "input": "", "output": "Oak."},
    ),
)
