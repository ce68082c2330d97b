"""Settings of the task that a tuning method trains and tests on."""

from typing import Literal

from pydantic import Field

from espalier.settings.table import Table

TEXT = "text"
"""Name of the language-modeling task on the clients' own text."""


NUM_CLASSES = {"sst2": 2, "mnli": 3, "boolq": 2}
"""Number of classes of the tasks that an encoder can do."""


WRITTEN = ("gsm8k",)
"""Tasks whose test items are answered with generated text."""


class TaskSettings(Table):
    """Table ``[task]``."""

    name: Literal[
        "text",
        "sst2",
        "mnli",
        "boolq",
        "arc-easy",
        "arc-challenge",
        "openbookqa",
        "mmlu",
        "piqa",
        "hellaswag",
        "winogrande",
        "gsm8k",
        "dolly",
        "alpaca",
    ] = Field(
        "text",
        description=(
            "`text`: windows of the clients' text; else a task, whose records are in `data.path` or"
            " on the hub. Prompts and answers are those of lm-evaluation-harness, which has neither"
            " dolly nor alpaca."
        ),
    )
    test_path: str = Field(
        "",
        description=(
            "JSON Lines of public test items; empty: the hub's test split, or no test. Each score"
            " stands beside its level of chance. Answers in writing (gsm8k) are not asked of"
            " clients."
        ),
    )
    max_test_items: int = Field(200, ge=0, description="Test items that are scored; 0 takes all.")
    max_tokens: int = Field(
        256,
        ge=8,
        description=(
            "Longest training sequence in tokens, at most as many as the model has positions;"
            " prompts lose their beginning, written answers their end."
        ),
    )
    max_test_tokens: int = Field(
        0,
        ge=0,
        description=(
            "Longest test item in tokens; 0: as many as the model takes. `summary.json`"
            " (`test_items`) says how many were cut."
        ),
    )
    answer_tokens: int = Field(
        256,
        ge=1,
        description=(
            "Tokens that a model may write in answer to a test item of gsm8k; it needs positions"
            " for them behind the longest prompt (the demo model has 256 in all)."
        ),
    )
    loss_on: Literal["answer", "all"] = Field(
        "answer",
        description=(
            "Tokens over which the training loss is taken: those of the answer, or the prompt's"
            " too."
        ),
    )

    @property
    def num_classes(self) -> int:
        """Number of classes for an encoder; 0 if encoders cannot do the task."""
        return NUM_CLASSES.get(self.name, 0)
