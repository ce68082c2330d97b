"""How much the inputs of a matrix fluctuate, and what that makes its channels worth (FLAP: An et al. 2024, section 3.2).

Moments of several parties' inputs are pooled exactly (Chan, Golub and LeVeque 1979), so that parties which keep their texts to
themselves find what one party finds that has all of them, but for rounding.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from pruning_kernels.clipping import LEAST_CLIENTS, clip_factors, within_ratio

Metric = Literal["wifv", "ifv", "wifn"]
"""Weighted input feature variance, the variance alone, or the weighted input feature norm."""

COLUMNS_AT_ONCE = 512
"""Channels that are in memory in float64 at a time."""


@dataclass(frozen=True)
class Moments:
    """What is known of the inputs of a matrix, over tokens."""

    count: int
    """Tokens."""
    mean: Tensor
    """(channels,), float64."""
    squares: Tensor
    """(channels,), float64: sum over tokens of the squared distance from the mean."""

    @property
    def variance(self) -> Tensor:
        """(channels,), float64, the unbiased estimate; zero for one token."""
        return self.squares / max(1, self.count - 1)

    def counted(self, count: int, factor: float) -> "Moments":
        """The same as if they were of so many tokens, of inputs that are ``factor`` times as large."""
        return Moments(count, self.mean * factor, self.squares * (factor**2 * count / self.count))

    @property
    def square_sum(self) -> Tensor:
        """(channels,), float64: sum over tokens of the squared input."""
        return self.squares + self.count * self.mean.square()


def moments_of(inputs: Tensor) -> Moments:
    """Moments of inputs, (tokens, channels), any floating dtype, on the CPU."""
    means = []
    squares = []
    for columns in inputs.split(COLUMNS_AT_ONCE, dim=1):
        tokens = columns.to(torch.float64)
        means.append(tokens.mean(dim=0))
        squares.append(tokens.sub_(means[-1]).square_().sum(dim=0))
    return Moments(len(inputs), torch.cat(means).cpu(), torch.cat(squares).cpu())


def pooled(parts: Sequence[Moments]) -> Moments:
    """Moments of all parties' inputs together."""
    count = sum(part.count for part in parts)
    mean = torch.stack([part.mean * (part.count / count) for part in parts]).sum(dim=0)
    squares = torch.stack(
        [part.squares + part.count * (part.mean - mean).square() for part in parts]
    ).sum(dim=0)
    return Moments(count, mean, squares)


def limited_by_median(
    parts: Sequence[Moments], most_ratio: float
) -> tuple[list[Moments], list[float]]:
    """Hold each party's moments near those of the median party.

    The variance of every channel stays between 1 / ``most_ratio`` and ``most_ratio`` times the median party's. The means go, as
    one vector in standard deviations of the median party, at most ``most_ratio`` times as far from the median means as those
    of the median party do.

    Returns
    -------
    parts : of fewer than three parties, and of those that keep within the limits, as they are
    excesses : of each party, by how much its worst number is beyond its limit; 1 where none is
    """
    if len(parts) < LEAST_CLIENTS:
        return list(parts), [1.0] * len(parts)
    variances = torch.stack([part.squares / part.count for part in parts])
    limited = within_ratio(variances, most_ratio)
    means = torch.stack([part.mean for part in parts])
    centre = means.median(dim=0).values
    spread = variances.median(dim=0).values.sqrt()
    spread = spread.clamp(min=float(spread.mean()) * 1e-6)
    distances = (
        ((means - centre) / spread.where(spread > 0, torch.ones(()).double()))
        .square()
        .mean(dim=1)
        .sqrt()
        .tolist()
    )
    factors = clip_factors(dict(enumerate(distances)), most_ratio)
    found = []
    excesses = []
    for place, part in enumerate(parts):
        beyond = variances[place] != limited[place]
        changed = Moments(
            part.count,
            part.mean if factors[place] == 1 else centre + factors[place] * (part.mean - centre),
            torch.where(beyond, limited[place] * part.count, part.squares),
        )
        found.append(changed)
        excesses.append(
            max(
                1 / max(factors[place], 1e-15),
                _largest_factor(variances[place][beyond], limited[place][beyond]),
            )
        )
    return found, excesses


def _largest_factor(found: Tensor, limited: Tensor) -> float:
    """Return the largest factor between numbers and their limited values; 1 if none was limited."""
    if not found.numel():
        return 1.0
    high = torch.maximum(found, limited)
    low = torch.minimum(found, limited)
    return float((high / low.clamp(min=1e-300)).max())


def channel_scores(moments: Moments, weight: Tensor, metric: Metric) -> Tensor:
    """What each input channel of a matrix is worth.

    ``wifv``: variance of the channel times the squared norm of its column (equation 5); ``ifv`` the variance alone; ``wifn``
    the mean over rows of the column's magnitudes times the channel's root mean square.

    Parameters
    ----------
    weight : (out_features, channels)

    Returns
    -------
    (channels,), float64, on the CPU
    """
    if metric == "ifv":
        return moments.variance
    values = weight.to(torch.float32)
    if metric == "wifv":
        return moments.variance * values.square().sum(dim=0, dtype=torch.float64).cpu()
    return (
        values.abs().mean(dim=0, dtype=torch.float64).cpu()
        * (moments.square_sum / moments.count).sqrt()
    )


def standardised(scores: Tensor) -> Tensor:
    """Scores less their mean, over their standard deviation (section 3.3); zeros where all are equal."""
    deviation = scores.std()
    return (scores - scores.mean()) / deviation if deviation > 0 else torch.zeros_like(scores)
