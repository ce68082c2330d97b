"""Records for tests, one for every task."""

from typing import Any

_CHOICES = {"text": ["quiet harbour", "engine"], "label": ["A", "B"]}
_ASKED = {"question": "Which of ten?", "choices": _CHOICES, "answerKey": "B"}

RECORDS: dict[str, dict[str, Any]] = {
    "sst2": {"sentence": "the quiet harbour ", "label": 1},
    "mnli": {"premise": "a copper engine", "hypothesis": "an engine", "label": "neutral"},
    "boolq": {"passage": "the harbour", "question": "is it quiet", "answer": True},
    "arc-easy": _ASKED,
    "arc-challenge": _ASKED,
    "openbookqa": {"question_stem": "the quiet", "choices": _CHOICES, "answerKey": "A"},
    "mmlu": {
        "question": "Which?",
        "choices": ["a", "b", "c", "d"],
        "answer": 2,
        "subject": "quiet_engines",
    },
    "piqa": {"goal": "the harbour", "sol1": "an engine", "sol2": "ten's", "label": 0},
    "hellaswag": {
        "activity_label": "Rowing",
        "ctx": "the quiet ",
        "endings": ["a", "the b", "42", "ten"],
        "label": 3,
    },
    "winogrande": {
        "sentence": "the _ is quiet.",
        "option1": "harbour",
        "option2": "engine",
        "answer": "1",
    },
    "gsm8k": {"question": "How many engines?", "answer": "42 engines\n#### 42"},
    "dolly": {
        "instruction": "Name one.",
        "context": "harbour",
        "response": "the engine",
        "category": "open_qa",
    },
    "alpaca": {"instruction": "Name one.", "input": "", "output": "copper"},
}
