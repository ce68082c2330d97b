"""A task: how its records become items, where Hugging Face keeps it, and how a model is scored on it."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from espalier.corpora.tasks.fields import Fields
from espalier.corpora.tasks.item import Item

Metric = Literal["acc", "acc_norm", "exact_match", "loss"]
"""Accuracy over options by log-likelihood, the same per character, share of generated answers that are right, and mean loss
per token of the answer."""


@dataclass(frozen=True)
class Hub:
    """A dataset of the Hugging Face hub: its name, configuration and the splits with answers to train and to test on."""

    name: str
    config: str = ""
    train: str = "train"
    test: str = ""
    """Empty where there is none: test on what the training split holds out."""


@dataclass(frozen=True)
class Generation:
    """How a written answer is found in what a model generates."""

    stop: tuple[str, ...]
    """The answer ends before the first of them."""
    patterns: tuple[tuple[str, re.Pattern[str], int], ...]
    """(name, pattern, which of its matches has the answer); the answer is the match's first group that holds something."""
    ignored: tuple[re.Pattern[str], ...]
    """Removed from found and true answer, in this order, before they are compared."""
    max_new_tokens: int = 256


@dataclass(frozen=True)
class Task:
    """A task by its name."""

    name: str
    hub: Hub
    metrics: tuple[Metric, ...]
    item: Callable[[Fields], Item]
    classes: tuple[str, ...] = ()
    """Names of the classes, in order, where an encoder can do the task too."""
    generation: Generation | None = None
    """For ``exact_match``."""
