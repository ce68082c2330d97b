"""Scores of a model on encoded test items, by the name of the metric."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from espalier.data.tasks.encoding import Encoded
from espalier.data.tasks.item import Item, collate
from espalier.data.tasks.scored_items import ScoredItems
from espalier.evaluation.perplexity import TOKENS_AT_ONCE, bounded
from espalier.hf.stream.block_stream import logits_at
from espalier.progress import report_each


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
    likelihoods = log_likelihoods(model, items.requests, batch_size, device, loss_limit)
    gold = [options[answer] for options, answer in zip(items.options(), items.answers, strict=True)]
    tokens = sum(request.answer_tokens for request in gold)
    scores = {"loss": -math.fsum(likelihoods[request] for request in gold) / tokens}
    if max(items.num_options) > 1:
        lengths = iter(items.characters)
        values = [[likelihoods[request] for request in options] for options in items.options()]
        normed = [[value / next(lengths) for value in options] for options in values]
        scores["acc"] = _share_right(values, items)
        scores["acc_norm"] = _share_right(normed, items)
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
    order = sorted(range(len(items)), key=lambda index: len(items.requests[index].token_ids))
    right = 0
    losses = []
    pad = model.config.pad_token_id or 0
    for start in report_each(range(0, len(order), batch_size), "scoring batch"):
        indices = order[start : start + batch_size]
        batch = collate([Encoded(items.requests[index].token_ids, 1) for index in indices], pad)
        logits = model(
            input_ids=batch.input_ids.to(device), attention_mask=batch.attention_mask.to(device)
        ).logits
        logits = logits.to("cpu", torch.float32)
        answers = torch.tensor([items.answers[index] for index in indices])
        valid = ~logits.isnan().any(dim=-1)
        right += int((logits.argmax(dim=-1) == answers).logical_and(valid).sum())
        batch_losses = torch.nn.functional.cross_entropy(logits, answers, reduction="none")
        losses += bounded(batch_losses, loss_limit).tolist()
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


TOKENS_IN_A_PASS = 1 << 14
"""Maximum number of tokens of a batch, padding included, unless it has a single text."""


@torch.no_grad()
def log_likelihoods(
    model: Any,
    encoded: Sequence[Encoded],
    batch_size: int,
    device: torch.device | str,
    loss_limit: float | None = None,
) -> dict[Encoded, float]:
    """Return the log-likelihood in nats of each answer, given its context.

    It is computed as in lm-evaluation-harness 0.4.13 without examples in the prompt.

    Parameters
    ----------
    model : causal language model with a head, in evaluation mode; see ``logits_at``
    encoded : requests; they can be one token longer than the model's limit, because the token after
        the last one is not predicted
    batch_size : maximum number of texts in a batch; it changes results only by rounding
    loss_limit : maximum loss of one token, see ``perplexity.bounded``; None: no limit
    """
    likelihoods: dict[Encoded, float] = {}
    for rows in report_each(list(_batches(set(encoded), batch_size)), "scoring batch"):
        batch = collate([Encoded(tokens, 1) for tokens in rows], 0)
        positions, targets = _asked(rows, batch.attention_mask.shape)
        logits = logits_at(
            model, batch.input_ids.to(device), batch.attention_mask.to(device), positions.to(device)
        )
        answers = _log_probabilities(logits, targets)
        for request in (request for requests in rows.values() for request in requests):
            answer, answers = answers.split(
                (request.answer_tokens, len(answers) - request.answer_tokens)
            )
            likelihoods[request] = -float(bounded(-answer, loss_limit).sum())
    return likelihoods


def _batches(
    requests: set[Encoded], batch_size: int
) -> Iterator[dict[tuple[int, ...], list[Encoded]]]:
    """Yield batches, longest texts first: token ids, with the requests that they answer.

    Batches of long texts have fewer texts, so that memory does not grow with the model's limit
    times ``batch_size``. Options that differ only in their last token, such as single words, share
    one text.
    """
    rows: dict[tuple[int, ...], list[Encoded]] = {}
    for request in sorted(
        requests,
        key=lambda request: (-len(request.token_ids), request.token_ids, request.answer_tokens),
    ):
        rows.setdefault(request.token_ids[:-1], []).append(request)
    inputs = list(rows)
    start = 0
    while start < len(inputs):
        num_rows = min(batch_size, max(1, TOKENS_IN_A_PASS // max(1, len(inputs[start]))))
        yield {tokens: rows[tokens] for tokens in inputs[start : start + num_rows]}
        start += num_rows


def _asked(
    rows: dict[tuple[int, ...], list[Encoded]], shape: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """Return the positions of a batch, (B, T), bool, at which answer tokens are predicted.

    The second tensor has the tokens, (tokens, 2), int64: index among the True positions, and token.
    """
    positions = torch.zeros(shape, dtype=torch.bool)
    targets = list[tuple[int, int]]()
    offset = 0
    for row, (tokens, requests) in zip(positions, rows.items(), strict=True):
        max_answer = max(request.answer_tokens for request in requests)
        row[len(tokens) - max_answer : len(tokens)] = True
        offset += max_answer
        for request in requests:
            first = offset - request.answer_tokens
            targets += enumerate(
                request.token_ids[len(request.token_ids) - request.answer_tokens :], first
            )
    return positions, torch.tensor(targets)


def _log_probabilities(logits: Iterator[Tensor], targets: Tensor) -> Tensor:
    """Return the log-probabilities, float32, of tokens by logits (places, vocabulary) in pieces."""
    log_probs = torch.empty(len(targets))
    start = 0
    for chunk in (part for piece in logits for part in piece.split(TOKENS_AT_ONCE)):
        mask = (targets[:, 0] >= start) & (targets[:, 0] < start + len(chunk))
        row, token = (targets[mask] - torch.tensor([start, 0])).T.to(chunk.device)
        log_probs[mask] = torch.log_softmax(chunk, dim=-1, dtype=torch.float32)[row, token].cpu()
        start += len(chunk)
    return log_probs
