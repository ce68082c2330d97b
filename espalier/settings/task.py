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
            "`text`: samples of the clients' text; otherwise a task whose records are in"
            " `data.path` or on the hub. Prompts and answers are those of lm-evaluation-harness,"
            " which has neither dolly nor alpaca."
        ),
    )
    test_path: str = Field(
        "",
        description=(
            "JSON Lines file with public test items; empty: the hub's test split, or no test. Each"
            " score is reported with its chance level. Clients do not evaluate generated answers"
            " (gsm8k)."
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
            " positions. Prompts are cut at their beginning, written answers at their end."
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
    answer_tokens: int = Field(
        256,
        ge=1,
        description=(
            "Maximum number of tokens that a model generates for a test item of gsm8k. The model"
            " needs positions for them after the longest prompt (the demo model has 256 in total)."
        ),
    )

    @property
    def num_classes(self) -> int:
        """Number of classes for an encoder; 0 if encoders cannot do the task."""
        return NUM_CLASSES.get(self.name, 0)
