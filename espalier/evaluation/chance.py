"""What a model reaches that has learnt nothing: the level beside which a score is to be read."""

import math
from collections import Counter
from collections.abc import Sequence

from espalier.corpora.tasks.item import Item


def chance_of_options(items: Sequence[Item]) -> float:
    """Accuracy of guessing among each item's options: the mean of 1 / their number."""
    return math.fsum(1 / len(item.options) for item in items) / len(items)


def majority_share(items: Sequence[Item]) -> float:
    """Accuracy of always naming the commonest class."""
    return max(Counter(item.answer for item in items).values()) / len(items)


def uniform_loss(vocabulary: int) -> float:
    """Loss in nats per token of a model to which all tokens are equally likely."""
    return math.log(vocabulary)
