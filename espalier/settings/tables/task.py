"""Settings of the task that a tuning method trains and tests on."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from espalier.settings.registry import part
from espalier.settings.table import Table

NO_TEMPLATE = "the model's tokenizer has no chat template"
"""Beginning of the error for a model that cannot render conversations."""
CHAT_TEMPLATES = {
    "chatml": (
        "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n'"
        " + message['content'] + '<|im_end|>' }}"
        "{% if message['role'] == 'assistant' %}{{ eos_token or '' }}{% endif %}{{ '\\n' }}"
        "{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )
}
"""Chat templates (Jinja) for tokenizers that have none, by name.

An answer ends with the tokenizer's end-of-text token too, so that a model learns to stop.
"""

CHAT = "chat"
"""Name of the task that reads conversations."""
TEXT = "text"
"""Name of the language-modeling task on the clients' own text."""


def tasks() -> Mapping[str, Any]:
    """Return all other tasks by name, an ``espalier.data.tasks.task.Task`` each.

    The table is imported when it is first needed, as the parts of a method are.
    """
    found: Mapping[str, Any] = part("espalier.data.tasks.catalogue:TASKS")
    return found


def known_task(name: str) -> str:
    """Return the name of a task; raise ValueError if there is no such task."""
    known = [TEXT, *tasks()]
    if name not in known:
        *others, last = map(repr, known)
        raise ValueError(f"Input should be {', '.join(others)} or {last}")
    return name


class TaskSettings(Table):
    """Table ``[task]``."""

    name: Annotated[str, AfterValidator(known_task)] = Field(
        "text",
        description=(
            "`text`: samples of the clients' text; otherwise a task whose records are in"
            " `data.path` or on the hub; `espalier tasks` shows them. Prompts and answers are those"
            " of lm-evaluation-harness, where it has the task."
        ),
    )
    test_path: str = Field(
        "",
        description=(
            "File with public test items, in any format of `data.path`; empty: the hub's test"
            " split, or no test. Each score is reported with its chance level. Clients do not"
            " evaluate generated answers (gsm8k)."
        ),
    )
    max_test_items: int = Field(
        200, ge=0, description="Maximum number of test items that are scored; 0: all."
    )
    max_tokens: int = Field(
        256,
        ge=8,
        description=(
            "Maximum length of a training sequence in tokens, at most the model's number of"
            " positions. Prompts are cut at their beginning, written answers and conversations at"
            " their end."
        ),
    )
    max_test_tokens: int = Field(
        0,
        ge=0,
        description=(
            "Maximum length of a test item in tokens; 0: as many as the model takes."
            " `summary.json` (`test_items`) states how many items were cut."
        ),
    )
    chat_template: Literal["tokenizer", "chatml"] = Field(
        "tokenizer",
        description=(
            "Chat template of the task `chat`: the tokenizer's own, or `chatml` for a tokenizer"
            " that has none. It is saved with the adapter and the merged model."
        ),
    )
    packing: bool = Field(
        False,
        description=(
            "Join short training sequences to rows of up to `max-tokens` tokens. No token attends"
            " to another record's, and positions begin again with each record. A step then trains"
            " on `batch-size` rows in place of `batch-size` records."
        ),
    )
    answer_tokens: int = Field(
        256,
        ge=1,
        description=(
            "Maximum number of tokens that a model generates for a test item of gsm8k. The model"
            " needs positions for them after the longest prompt (the demo model has 256 in total)."
        ),
    )
