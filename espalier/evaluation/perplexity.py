"""Perplexity over non-overlapping windows, block by block.

As in the papers (Wanda, FedPrLLM): the mean next-token loss of each window, averaged over windows, exponentiated. A
window of n tokens has n - 1 predictions.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from espalier.modeling.block_stream import BlockStream, run_through
from espalier.modeling.edits import Edits, dense


@torch.no_grad()
def mean_losses(
    stream: BlockStream, texts: Mapping[str, Tensor], edits: Edits = dense, loss_limit: float | None = None
) -> dict[str, float]:
    """Mean next-token loss in nats of the edited model on several texts, in one walk through the blocks.

    Parameters
    ----------
    texts : name -> windows (windows, tokens), int64, all with the same number of tokens
    edits : what is done to each block's dense weights
    loss_limit : nats that one prediction counts at most, see ``bounded``; None leaves losses as they are

    Returns
    -------
    dict
        name -> loss
    """
    activations = run_through(stream, torch.cat(list(texts.values())), edits)
    per_window: list[float] = []
    for input_ids, logits in zip(activations.input_ids, stream.logits(activations), strict=True):
        predictions = logits[:, :-1].to(torch.float32)
        loss = nn.functional.cross_entropy(predictions.flatten(0, 1), input_ids[:, 1:].flatten(), reduction="none")
        per_window += bounded(loss, loss_limit).view(len(input_ids), -1).to(torch.float64).mean(dim=1).tolist()
    losses, start = {}, 0
    for name, windows in texts.items():
        losses[name] = math.fsum(per_window[start : start + len(windows)]) / len(windows)
        start += len(windows)
    return losses


def bounded(losses: Tensor, limit: float | None) -> Tensor:
    """Losses of single predictions, none above a limit; one that is no number counts as the limit. None changes nothing."""
    return losses if limit is None else losses.nan_to_num(nan=limit).clamp(max=limit)


def perplexity(loss: float) -> float:
    """Perplexity of a mean loss in nats; infinity where it is too large for a float."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf
