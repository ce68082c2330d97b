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
from espalier.evaluation.perplexity import TOKENS_AT_ONCE, bounded
from espalier.modeling.logits import logits_at
from espalier.pace.beats import beats

LENGTHS: Mapping[str, Callable[[str], int]] = {
    "acc": lambda option: 1,
    "acc_norm": len,
    "acc_bytes": lambda option: len(option.encode()),
}
"""By what an option's log-likelihood is divided before options are compared. As in the harness's code, ``acc_norm`` counts the
option's characters and ``acc_bytes`` its bytes; the two differ outside ASCII. The delimiter is not counted."""

TOKENS_IN_A_PASS = 1 << 14
"""So many tokens, padding included, go through a model at most, or a single text."""

NO_PREDICTION = -1
"""What a model predicts that gives a log-likelihood which is not a number; it is never right."""


def option_log_likelihoods(
    model: Any, encode: Encode, items: Sequence[Item], max_tokens: int, batch_size: int = 16, device: torch.device | str = "cpu"
) -> list[list[float]]:
    """Log-likelihood in nats of each option of each item, given its context.

    Parameters
    ----------
    model : causal, with a language-model head, in evaluation mode; see ``logits_at``
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
    for rows in beats(list(_batches(set(encoded), batch_size)), "scoring batch"):
        batch = collate([Encoded(tokens, 1) for tokens in rows], 0, "all")
        places, asked = _asked(rows, batch.attention_mask.shape)
        logits = logits_at(model, batch.input_ids.to(device), batch.attention_mask.to(device), places.to(device))
        answers = _log_probabilities(logits, asked)
        for one in (one for wanted in rows.values() for one in wanted):
            answer, answers = answers.split((one.answer_tokens, len(answers) - one.answer_tokens))
            found[one] = -float(bounded(-answer, loss_limit).sum())
    return found


def _batches(scored: set[Encoded], batch_size: int) -> Iterator[dict[tuple[int, ...], list[Encoded]]]:
    """What goes through the model together, longest first: its tokens, and what is scored by them.

    Of long texts there are fewer, so that memory does not grow with a model's limit times ``batch_size``. Options that differ
    in their last token alone, as single words do, need the model once.
    """
    rows: dict[tuple[int, ...], list[Encoded]] = {}
    for one in sorted(scored, key=lambda one: (-len(one.token_ids), one.token_ids, one.answer_tokens)):
        rows.setdefault(one.token_ids[:-1], []).append(one)
    inputs = list(rows)
    start = 0
    while start < len(inputs):
        number = min(batch_size, max(1, TOKENS_IN_A_PASS // max(1, len(inputs[start]))))
        yield {tokens: rows[tokens] for tokens in inputs[start : start + number]}
        start += number


def _asked(rows: dict[tuple[int, ...], list[Encoded]], shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """At which places of a batch a token of an answer is predicted, (B, T), bool; and (number of the place, token) of each."""
    places, asked, before = torch.zeros(shape, dtype=torch.bool), list[tuple[int, int]](), 0
    for row, (tokens, wanted) in zip(places, rows.items(), strict=True):
        longest = max(one.answer_tokens for one in wanted)
        row[len(tokens) - longest : len(tokens)] = True
        before += longest
        for one in wanted:
            first = before - one.answer_tokens
            asked += enumerate(one.token_ids[len(one.token_ids) - one.answer_tokens :], first)
    return places, torch.tensor(asked)


def _log_probabilities(logits: Iterator[Tensor], asked: Tensor) -> Tensor:
    """Of the asked tokens, in float32; logits (places, vocabulary) come in pieces."""
    found, start = torch.empty(len(asked)), 0
    for piece in (few for many in logits for few in many.split(TOKENS_AT_ONCE)):
        here = (asked[:, 0] >= start) & (asked[:, 0] < start + len(piece))
        place, token = (asked[here] - torch.tensor([start, 0])).T.to(piece.device)
        found[here] = torch.log_softmax(piece, dim=-1, dtype=torch.float32)[place, token].cpu()
        start += len(piece)
    return found


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
