"""Membership test on statistics: likelihood ratio of a mean with and without a sample.

A reply is taken as the mean of n vectors, one per sample, drawn from a population with mean m and
covariance S. If a known sample x is among them, the reply is closer to it. The logarithm of the
likelihood ratio is, up to terms that do not depend on the reply, ``(r - m)' S^-1 (x - m)``
(Sankararaman et al. 2009, *Genomic privacy and limits of individual detection in a pool*, for
independent numbers). Here it is divided by the norm of ``x - m``, so that scores of different
samples have one scale. The attacker estimates m and S from reference text. S is regularised towards
the variances alone, since there are fewer references than numbers.

For replies that are no means, such as masks, the test is a heuristic, and the result a lower bound.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

RIDGE = 0.1
"""Weight of the single variances in S, relative to their mean."""


class Products:
    """Inner products of replies and samples, standardised number by number; added up over places.

    They are all that the test needs, so that vectors are in memory for one place at a time.

    Parameters
    ----------
    noise : variance that the noise of replies adds to each number of a sample
    """

    def __init__(self, noise: float = 0.0) -> None:
        self._noise = noise
        zero = torch.zeros((), dtype=torch.float64)
        self.numbers = 0
        self._reply_known = self._reply_reference = self._known_reference = zero
        self._known = self._reference = zero

    def add(self, replies: Tensor, known: Tensor, reference: Tensor, of_replies: Tensor) -> None:
        """Add the numbers of a place.

        Parameters
        ----------
        replies : (replies, numbers)
        known : (candidates, numbers), of single samples
        reference : (references, numbers), of single samples
        of_replies : (numbers,), mean of replies that the attacker made of reference samples
        """
        reference = reference.float()
        mean = reference.mean(dim=0)
        spread = (reference.var(dim=0) + self._noise).sqrt()
        told = spread > 0
        reference = (reference[:, told] - mean[told]) / spread[told]
        known = (known[:, told].float() - mean[told]) / spread[told]
        replies = (replies[:, told].float() - of_replies[told].float()) / spread[told]
        self.numbers += int(told.sum())
        self._reply_known = self._reply_known + (replies @ known.T).double()
        self._reply_reference = self._reply_reference + (replies @ reference.T).double()
        self._known_reference = self._known_reference + (known @ reference.T).double()
        self._known = self._known + known.square().sum(dim=1).double()
        self._reference = self._reference + (reference @ reference.T).double()

    def scores(self) -> Tensor:
        """Return the score of each candidate for each reply: (replies, candidates), float64.

        The inverse of ``S = Z' Z / k + t`` with k references Z is applied by Woodbury's identity.
        """
        references = len(self._reference)
        inner = self._reference + references * RIDGE * torch.eye(references, dtype=torch.float64)
        solved = torch.linalg.solve(inner, self._known_reference.T)
        products = self._reply_known - self._reply_reference @ solved
        squares = self._known - (self._known_reference * solved.T).sum(dim=1)
        return products / squares.clamp(min=1e-12).sqrt()


def scores_of(
    places: Iterable[tuple[Tensor, Tensor, Tensor, Tensor]], noise: float = 0.0
) -> Tensor:
    """Return the scores after all places, each with the arguments of ``Products.add``."""
    products = Products(noise)
    for place in places:
        products.add(*place)
    return products.scores()
