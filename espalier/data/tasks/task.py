"""Definition of a task: its items, its dataset on Hugging Face and its metrics."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from espalier.data.tasks.fields import Fields
from espalier.data.tasks.item import Item

Metric = Literal["acc", "acc_norm", "exact_match", "loss"]
"""Name of a metric.

- ``acc``: accuracy over options by log-likelihood
- ``acc_norm``: accuracy over options by log-likelihood per character
- ``exact_match``: fraction of generated answers that are correct
- ``loss``: mean loss per token of the answer
"""


@dataclass(frozen=True)
class Hub:
    """Dataset of the Hugging Face hub with its configuration and its labelled splits."""

    name: str
    config: str = ""
    train: str = "train"
    test: str = ""
    """Test split with answers.

    If it is empty, models are tested on the held-out part of the training split.
    """


@dataclass(frozen=True)
class Generation:
    """Rules that find a written answer in generated text."""

    stop: tuple[str, ...]
    """Stop strings; the answer ends before the first one that occurs."""
    patterns: tuple[tuple[str, re.Pattern[str], int], ...]
    """(name, pattern, index of the match with the answer).

    The answer is the first group of the match that is not empty.
    """
    ignored: tuple[re.Pattern[str], ...]
    """Patterns that are removed, in this order, from found and true answer before the comparison.
    """
    max_new_tokens: int = 256


@dataclass(frozen=True)
class Task:
    """Task with a name."""

    name: str
    hub: Hub
    metrics: tuple[Metric, ...]
    item: Callable[[Fields], Item]
    classes: tuple[str, ...] = ()
    """Names of the classes in order, if an encoder can solve the task too."""
    generation: Generation | None = None
    """Rules for ``exact_match``."""
    sample: Mapping[str, Any] = field(default_factory=dict)
    """Record that shows the fields, for the list of tasks."""
    values: str = ""
    """What the fields may contain, where the sample does not show it, for the list of tasks."""
    other_samples: tuple[Mapping[str, Any], ...] = ()
    """Records of the other forms that a task reads."""
    other_fields: tuple[str, ...] = ()
    """Fields that no sample has."""

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of all fields that the task reads."""
        samples = (self.sample, *self.other_samples)
        names = [name for sample in samples for name in sample]
        return tuple(dict.fromkeys((*names, *self.other_fields)))
