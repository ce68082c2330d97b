"""Two membership tests by a server that follows the protocol.

The server has the base model, one reply, and known text samples. Adapters: the loss of a sample
decreases more if it was used in training. Masks and moments: the server computes from the known
samples what a client would compute, and compares it with the reply.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from espalier.evaluation.perplexity import mean_losses
from espalier.hf.stream.block_stream import BlockStream
from espalier.hf.whole.adapters import merged
from espalier.models.adapters import AdapterPlan, Tensors


@dataclass(frozen=True)
class Outcome:
    """Number of trials, and how well the member was recognised in them.

    The score of the member is column ``i`` in row ``i``.
    """

    trials: int
    first: int
    """Number of trials in which the member has the highest score of all candidates.

    By chance it is one in the number of candidates.
    """
    ahead: float
    """Fraction of pairs of a member and another candidate in which the member scores higher.

    By chance it is 50%.
    """

    @staticmethod
    def of(scores: Tensor) -> "Outcome":
        """Count the outcomes of a square matrix of scores, (replies, candidates)."""
        own = scores.diagonal()[:, None]
        others = ~torch.eye(len(scores), dtype=torch.bool)
        beaten = (own > scores) & others
        first = int((beaten.sum(dim=1) == len(scores) - 1).sum())
        return Outcome(len(scores), first, float(beaten.sum()) / int(others.sum()))


def sample_losses(
    stream: BlockStream,
    samples: Tensor,
    adapters: AdapterPlan | None = None,
    tensors: Tensors | None = None,
) -> Tensor:
    """Return the loss of each sample, (samples,), float64, with adapters or without."""
    texts = {str(number): sample[None] for number, sample in enumerate(samples)}
    if adapters is None or tensors is None:
        return torch.tensor(list(mean_losses(stream, texts).values()), dtype=torch.float64)
    edits = merged(adapters, tensors)
    return torch.tensor(list(mean_losses(stream, texts, edits).values()), dtype=torch.float64)


def falls_of_loss(
    stream: BlockStream, samples: Tensor, adapters: AdapterPlan, replies: Sequence[Tensors]
) -> Tensor:
    """Return the decrease of each known sample's loss by each reply: (replies, samples)."""
    before = sample_losses(stream, samples)
    return torch.stack(
        [before - sample_losses(stream, samples, adapters, reply) for reply in replies]
    )


def resemblances(
    replies: Callable[[int], Tensor], candidates: Callable[[int], Tensor], parts: int
) -> Tensor:
    """Return the cosine of each reply with each candidate after standardization.

    The candidates' mean is subtracted, and the result is divided by their standard deviation.
    Numbers in which all candidates agree are left out.

    Parameters
    ----------
    replies, candidates : part -> (replies, numbers) and (candidates, numbers); a part is a block or
        place of the model
    parts : number of parts

    Returns
    -------
    Tensor
        (replies, candidates), float64
    """
    products: Tensor = torch.zeros((), dtype=torch.float64)
    left = right = products
    for part in range(parts):
        reply = replies(part).to(torch.float32)
        candidate = candidates(part).to(torch.float32)
        mean = candidate.mean(dim=0)
        spread = candidate.std(dim=0)
        told = spread > 0
        reply, candidate = (
            (value[:, told] - mean[told]) / spread[told] for value in (reply, candidate)
        )
        products = products + (reply @ candidate.T).double()
        left = left + reply.square().sum(dim=1).double()
        right = right + candidate.square().sum(dim=1).double()
    return products / (left.sqrt()[:, None] * right.sqrt())
