"""Accuracy by log-likelihood: does a language model find the right option likelier than the others?

As lm-evaluation-harness 0.4.13 computes ``acc`` and ``acc_norm`` without examples in the prompt.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from espalier.corpora.tasks.batches import collate
from espalier.corpora.tasks.encoding import Encoded, encode_pair, keep_right
from espalier.corpora.tasks.item import Item
from espalier.corpora.windows import Encode
from espalier.evaluation.perplexity import bounded

LENGTHS: Mapping[str, Callable[[str], int]] = {
    "acc": lambda option: 1,
    "acc_norm": len,
    "acc_bytes": lambda option: len(option.encode()),
}
"""By what an option's log-likelihood is divided before options are compared. As in the harness's code, ``acc_norm`` counts the
option's characters and ``acc_bytes`` its bytes; the two differ outside ASCII. The delimiter is not counted."""

NO_PREDICTION = -1
"""What a model predicts that gives a log-likelihood which is not a number; it is never right."""


def option_log_likelihoods(
    model: Any, encode: Encode, items: Sequence[Item], max_tokens: int, batch_size: int = 16, device: torch.device | str = "cpu"
) -> list[list[float]]:
    """Log-likelihood in nats of each option of each item, given its context.

    Parameters
    ----------
    model : called with ``input_ids`` and ``attention_mask``, returns ``logits`` (B, T, vocabulary); causal, in evaluation mode
    max_tokens : how many tokens the model takes; longer contexts lose tokens at their beginning
    batch_size : texts that go through the model together; it changes results by rounding alone

    Raises
    ------
    Mistake
        An option alone has more than ``max_tokens`` tokens.
    """
    # The model is not asked what follows the last token, so that one more than it takes can be scored.
    scored = [
        [keep_right(encode_pair(encode, *request), max_tokens + 1, item.where) for request in item.requests] for item in items
    ]
    found = log_likelihoods(model, [one for options in scored for one in options], batch_size, device)
    return [[found[one] for one in options] for options in scored]


@torch.no_grad()
def log_likelihoods(
    model: Any, encoded: Sequence[Encoded], batch_size: int, device: torch.device | str, loss_limit: float | None = None
) -> dict[Encoded, float]:
    """Log-likelihood in nats of each answer, given its context; see ``option_log_likelihoods``.

    With a ``loss_limit`` no token counts less than its negative, see ``perplexity.bounded``.
    """
    found: dict[Encoded, float] = {}
    for rows in _batches(set(encoded), batch_size):
        batch = collate([Encoded(tokens, 1) for tokens in rows], 0, "all")
        logits = model(input_ids=batch.input_ids.to(device), attention_mask=batch.attention_mask.to(device)).logits
        for row, (tokens, wanted) in zip(logits, rows.items(), strict=True):
            found |= {one: _log_likelihood(row[: len(tokens)], one, loss_limit) for one in wanted}
    return found


def _batches(scored: set[Encoded], batch_size: int) -> Iterator[dict[tuple[int, ...], list[Encoded]]]:
    """What goes through the model together, longest first: its tokens, and what is scored by them.

    Options that differ in their last token alone, as single words do, need the model once.
    """
    rows: dict[tuple[int, ...], list[Encoded]] = {}
    for one in sorted(scored, key=lambda one: (-len(one.token_ids), one.token_ids, one.answer_tokens)):
        rows.setdefault(one.token_ids[:-1], []).append(one)
    inputs = list(rows)
    for start in range(0, len(inputs), batch_size):
        yield {tokens: rows[tokens] for tokens in inputs[start : start + batch_size]}


def _log_likelihood(logits: Tensor, one: Encoded, loss_limit: float | None) -> float:
    """Sum of the log-probabilities of the answer's tokens, in float32: logits (tokens - 1, vocabulary)."""
    log_probabilities = torch.log_softmax(logits[-one.answer_tokens :], dim=-1, dtype=torch.float32)
    answer = torch.tensor(one.token_ids[-one.answer_tokens :], device=logits.device)
    return -float(bounded(-log_probabilities.gather(1, answer[:, None]), loss_limit).sum())


def option_predictions(items: Sequence[Item], log_likelihoods: Sequence[Sequence[float]], metric: str = "acc") -> list[int]:
    """The likeliest option of each item, by ``metric`` (see ``LENGTHS``); of equally likely ones the first."""
    length = LENGTHS[metric]
    predictions = []
    for item, found in zip(items, log_likelihoods, strict=True):
        scores = torch.tensor(found, dtype=torch.float64) / torch.tensor([length(option) for option in item.options])
        predictions.append(NO_PREDICTION if bool(scores.isnan().any()) else scores.tolist().index(float(scores.max())))
    return predictions


def option_accuracy(items: Sequence[Item], log_likelihoods: Sequence[Sequence[float]], metric: str = "acc") -> float:
    """Share of the items, of which there is at least one, whose right option is the likeliest."""
    predictions = option_predictions(items, log_likelihoods, metric)
    return sum(place == item.answer for place, item in zip(predictions, items, strict=True)) / len(items)
