"""Chance levels: scores of a model that has learned nothing, for comparison."""

import math
from collections import Counter
from collections.abc import Sequence

from espalier.data.tasks.item import Item


def chance_of_options(items: Sequence[Item]) -> float:
    """Return the accuracy of random choice: the mean of 1 / number of options."""
    return math.fsum(1 / len(item.options) for item in items) / len(items)


def majority_share(items: Sequence[Item]) -> float:
    """Return the accuracy of always predicting the most common class."""
    return max(Counter(item.answer for item in items).values()) / len(items)


def uniform_loss(vocabulary: int) -> float:
    """Return the loss in nats per token of a model that gives all tokens equal probability."""
    return math.log(vocabulary)
