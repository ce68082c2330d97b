"""Perplexity over non-overlapping samples, computed block by block.

As in the papers (Wanda, FedPrLLM), it is the exponential of the mean next-token loss of each
sample, averaged over samples. A sample of n tokens has n - 1 predictions. Logits are computed for a
few hundred tokens at a time.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from espalier.hf.stream.block_stream import BlockStream, run_through
from espalier.hf.stream.edits import Edits, dense
from espalier.progress import report_progress

TOKENS_AT_ONCE = 64
"""Number of tokens whose softmax is computed at a time."""


@torch.no_grad()
def mean_losses(
    stream: BlockStream,
    texts: Mapping[str, Tensor],
    edits: Edits = dense,
    loss_limit: float | None = None,
) -> dict[str, float]:
    """Return the mean next-token loss in nats of the edited model on several texts.

    All texts pass through each block before the next block is loaded.

    Parameters
    ----------
    texts : name -> samples (samples, tokens), int64, all with the same number of tokens
    loss_limit : maximum loss of one prediction in nats, see ``bounded``; None: no limit
    """
    samples = torch.cat(list(texts.values()))
    activations = run_through(stream, samples, edits)
    # ``roll`` makes a sample's first token the successor of its last one; below, this prediction is
    # left out.
    following = torch.cat(activations.input_ids).roll(-1, dims=1).flatten()
    token_losses = []
    for logits in stream.logits(activations):
        report_progress(f"scoring, {len(following)} of {samples.numel()} tokens left")
        labels, following = following.split((len(logits), len(following) - len(logits)))
        # A few tokens at a time, because a softmax is as large as its logits.
        for chunk, tokens in zip(
            logits.split(TOKENS_AT_ONCE), labels.split(TOKENS_AT_ONCE), strict=True
        ):
            loss = nn.functional.cross_entropy(chunk.to(torch.float32), tokens, reduction="none")
            token_losses.append(loss)
    per_token = bounded(torch.cat(token_losses), loss_limit).view(samples.shape)[:, :-1]
    per_sample = per_token.to(torch.float64).mean(dim=1).tolist()
    losses = {}
    start = 0
    for name, samples in texts.items():
        losses[name] = math.fsum(per_sample[start : start + len(samples)]) / len(samples)
        start += len(samples)
    return losses


def bounded(losses: Tensor, limit: float | None) -> Tensor:
    """Return losses of single predictions, limited from above.

    NaN counts as the limit. With ``limit = None`` nothing is changed.
    """
    return losses if limit is None else losses.nan_to_num(nan=limit).clamp(max=limit)


def perplexity(loss: float) -> float:
    """Return the perplexity of a mean loss in nats; infinity if it is too large for a float."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf
