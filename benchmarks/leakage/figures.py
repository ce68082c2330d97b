"""Figures of a membership test: AUC, true positives at few false ones, choice of two data sets."""

from dataclasses import dataclass

import torch
from torch import Tensor

FALSE_POSITIVES = 0.01
"""Fraction of false positives at which true positives are counted (Carlini et al. 2022)."""


@dataclass(frozen=True)
class Figures:
    """Result of an attack on one kind of message."""

    members: int
    """Number of (reply, sample) pairs whose sample was used for the reply."""
    others: int
    """Number of pairs whose sample was not used."""
    auc: float
    """Probability that a member scores higher than another sample; ties count half. Chance: 0.5."""
    true_positives: float
    """Fraction of members above the score that 1% of the other samples reach. Chance: 0.01."""
    of_two_all: float
    """Fraction of pairs of a used and an unused data set in which the used one scores higher.

    The attacker knows all samples of both. Chance: 0.5.
    """
    of_two_quarter: float
    """The same for an attacker who knows a quarter of the samples of both."""


def auc(members: Tensor, others: Tensor) -> float:
    """Return the probability that a member's score is higher than another's; ties count half."""
    ordered = others.sort().values
    below = torch.searchsorted(ordered, members, side="left")
    up_to = torch.searchsorted(ordered, members, side="right")
    return float((below + up_to).double().mean()) / (2 * len(others))


def true_positives(members: Tensor, others: Tensor, rate: float = FALSE_POSITIVES) -> float:
    """Return the fraction of members above a threshold with at most ``rate`` false positives.

    The threshold is a score of ``others``; members have to be strictly above it.
    """
    allowed = int(rate * len(others))
    threshold = others.sort(descending=True).values[allowed]
    return float((members > threshold).double().mean())


def figures(scores: Tensor, members: Tensor, samples: int) -> Figures:
    """Return the figures of an attack.

    Parameters
    ----------
    scores : (replies, candidates), float64
    members : (replies, candidates), bool: True if the reply is based on the candidate. The
        candidates of a data set follow each other, and are all members of a reply or all not
    samples : number of samples of a data set
    """
    own = scores[members]
    other = scores[~members]
    return Figures(
        int(members.sum()),
        int((~members).sum()),
        auc(own, other),
        true_positives(own, other),
        of_two(scores, members, samples, samples),
        of_two(scores, members, samples, max(1, samples // 4)),
    )


def of_two(scores: Tensor, members: Tensor, samples: int, known: int) -> float:
    """Return how often the used one of two data sets scores higher, by its first ``known`` samples.

    The score of a data set is the mean of its samples' scores. Every used one is compared with
    every unused one, reply by reply; ties count half.
    """
    sets = scores.view(len(scores), -1, samples)[:, :, :known].mean(dim=2)
    used = members.view(len(scores), -1, samples)[:, :, 0]
    found = [auc(own[is_used], own[~is_used]) for own, is_used in zip(sets, used, strict=True)]
    weights = used.sum(dim=1).tolist()
    return sum(one * weight for one, weight in zip(found, weights, strict=True)) / sum(weights)
