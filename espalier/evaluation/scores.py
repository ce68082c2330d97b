"""Scores of a model on encoded test items, by the name of the metric."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from espalier.data.tasks.encoding import Encoded
from espalier.data.tasks.item import Item, collate
from espalier.data.tasks.scored_items import ScoredItems
from espalier.evaluation.options import log_likelihoods
from espalier.evaluation.perplexity import bounded
from espalier.progress import beats


def score(
    model: Any,
    items: ScoredItems,
    classes: bool,
    batch_size: int,
    device: torch.device,
    loss_limit: float | None = None,
) -> dict[str, float]:
    """Return ``loss`` and accuracies of a model on items.

    Parameters
    ----------
    model : in evaluation mode; a language model, or with ``classes`` an encoder with a head
    items : at least one item
    loss_limit : maximum loss in nats of one token, or with ``classes`` of one item, see
        ``perplexity.bounded``; None: no limit

    Returns
    -------
    dict
        ``loss``: loss of the correct answers, in nats per token, or with ``classes`` per item.
        ``acc``: fraction of items whose correct option or class is the most likely one.
        ``acc_norm``: the same, with log-likelihoods per character of the option (not per byte, and
        without the delimiter, as in lm-evaluation-harness 0.4.13). Items without a choice have no
        accuracies, and classes no ``acc_norm``.
    """
    scored = _score_classes if classes else _score_options
    return scored(model, items, batch_size, device, loss_limit)


def _score_options(
    model: Any, items: ScoredItems, batch_size: int, device: torch.device, loss_limit: float | None
) -> dict[str, float]:
    found = log_likelihoods(model, items.requests, batch_size, device, loss_limit)
    gold = [options[answer] for options, answer in zip(items.options(), items.answers, strict=True)]
    tokens = sum(one.answer_tokens for one in gold)
    scores = {"loss": -math.fsum(found[one] for one in gold) / tokens}
    if max(items.num_options) > 1:
        lengths = iter(items.characters)
        per_item = [[(found[one], next(lengths)) for one in options] for options in items.options()]
        scores["acc"] = _share_right(
            [[value for value, _ in options] for options in per_item], items
        )
        scores["acc_norm"] = _share_right(
            [[value / length for value, length in options] for options in per_item], items
        )
    return scores


def _share_right(values: list[list[float]], items: ScoredItems) -> float:
    """Return the fraction of items whose best option is the correct one.

    Of equal options the first one is chosen; an item with NaN counts as wrong.
    """
    right = sum(
        not any(math.isnan(value) for value in options) and options.index(max(options)) == answer
        for options, answer in zip(values, items.answers, strict=True)
    )
    return right / len(items)


@torch.no_grad()
def _score_classes(
    model: Any, items: ScoredItems, batch_size: int, device: torch.device, loss_limit: float | None
) -> dict[str, float]:
    # Texts of similar length form a batch, which has little padding.
    order = sorted(range(len(items)), key=lambda place: len(items.requests[place].token_ids))
    right = 0
    losses = []
    pad = model.config.pad_token_id or 0
    for start in beats(range(0, len(order), batch_size), "scoring batch"):
        places = order[start : start + batch_size]
        batch = collate([Encoded(items.requests[place].token_ids, 1) for place in places], pad)
        logits = model(
            input_ids=batch.input_ids.to(device), attention_mask=batch.attention_mask.to(device)
        ).logits
        logits = logits.to("cpu", torch.float32)
        answers = torch.tensor([items.answers[place] for place in places])
        right += int(
            (logits.argmax(dim=-1) == answers).logical_and(~logits.isnan().any(dim=-1)).sum()
        )
        losses += bounded(
            torch.nn.functional.cross_entropy(logits, answers, reduction="none"), loss_limit
        ).tolist()
    return {"loss": math.fsum(losses) / len(items), "acc": right / len(items)}


def chance_of_options(items: Sequence[Item]) -> float:
    """Return the accuracy of random choice: the mean of 1 / number of options."""
    return math.fsum(1 / len(item.options) for item in items) / len(items)


def majority_share(items: Sequence[Item]) -> float:
    """Return the accuracy of always predicting the most common class."""
    return max(Counter(item.answer for item in items).values()) / len(items)


def uniform_loss(vocabulary: int) -> float:
    """Return the loss in nats per token of a model that gives all tokens equal probability."""
    return math.log(vocabulary)
