"""Log-likelihoods of options, given their contexts.

They are computed as in lm-evaluation-harness 0.4.13 without examples in the prompt.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from espalier.data.tasks.encoding import Encoded
from espalier.data.tasks.item import collate
from espalier.evaluation.perplexity import TOKENS_AT_ONCE, bounded
from espalier.hf.stream.block_stream import logits_at
from espalier.progress import beats

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

    Parameters
    ----------
    model : causal language model with a head, in evaluation mode; see ``logits_at``
    encoded : requests; they can be one token longer than the model's limit, because the token after
        the last one is not predicted
    batch_size : maximum number of texts in a batch; it changes results only by rounding
    loss_limit : maximum loss of one token, see ``perplexity.bounded``; None: no limit
    """
    found: dict[Encoded, float] = {}
    for rows in beats(list(_batches(set(encoded), batch_size)), "scoring batch"):
        batch = collate([Encoded(tokens, 1) for tokens in rows], 0)
        places, asked = _asked(rows, batch.attention_mask.shape)
        logits = logits_at(
            model, batch.input_ids.to(device), batch.attention_mask.to(device), places.to(device)
        )
        answers = _log_probabilities(logits, asked)
        for one in (one for wanted in rows.values() for one in wanted):
            answer, answers = answers.split((one.answer_tokens, len(answers) - one.answer_tokens))
            found[one] = -float(bounded(-answer, loss_limit).sum())
    return found


def _batches(
    scored: set[Encoded], batch_size: int
) -> Iterator[dict[tuple[int, ...], list[Encoded]]]:
    """Yield batches, longest texts first: token ids, with the requests that they answer.

    Batches of long texts have fewer texts, so that memory does not grow with the model's limit
    times ``batch_size``. Options that differ only in their last token, such as single words, share
    one text.
    """
    rows: dict[tuple[int, ...], list[Encoded]] = {}
    for one in sorted(
        scored, key=lambda one: (-len(one.token_ids), one.token_ids, one.answer_tokens)
    ):
        rows.setdefault(one.token_ids[:-1], []).append(one)
    inputs = list(rows)
    start = 0
    while start < len(inputs):
        number = min(batch_size, max(1, TOKENS_IN_A_PASS // max(1, len(inputs[start]))))
        yield {tokens: rows[tokens] for tokens in inputs[start : start + number]}
        start += number


def _asked(
    rows: dict[tuple[int, ...], list[Encoded]], shape: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """Return the positions of a batch at which answer tokens are predicted, and these tokens.

    Returns
    -------
    places : (B, T), bool
    asked : (tokens, 2), int64: index among the True positions, and the token
    """
    places = torch.zeros(shape, dtype=torch.bool)
    asked = list[tuple[int, int]]()
    before = 0
    for row, (tokens, wanted) in zip(places, rows.items(), strict=True):
        longest = max(one.answer_tokens for one in wanted)
        row[len(tokens) - longest : len(tokens)] = True
        before += longest
        for one in wanted:
            first = before - one.answer_tokens
            asked += enumerate(one.token_ids[len(one.token_ids) - one.answer_tokens :], first)
    return places, torch.tensor(asked)


def _log_probabilities(logits: Iterator[Tensor], asked: Tensor) -> Tensor:
    """Return the log-probabilities of the asked tokens, float32.

    Parameters
    ----------
    logits : (places, vocabulary), in pieces
    """
    found = torch.empty(len(asked))
    start = 0
    for piece in (few for many in logits for few in many.split(TOKENS_AT_ONCE)):
        here = (asked[:, 0] >= start) & (asked[:, 0] < start + len(piece))
        place, token = (asked[here] - torch.tensor([start, 0])).T.to(piece.device)
        found[here] = torch.log_softmax(piece, dim=-1, dtype=torch.float32)[place, token].cpu()
        start += len(piece)
    return found
