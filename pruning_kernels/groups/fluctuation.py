"""Fluctuation of a matrix's inputs, and importance of its channels.

Source: FLAP, An et al. 2024, section 3.2.

Moments of several parties' inputs are pooled exactly (Chan, Golub and LeVeque 1979). Parties that
keep their texts private get the result of one party that has all texts, except for rounding.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pruning_kernels.lora.clipping import MIN_CLIENTS, clip_factors, within_ratio
from pruning_kernels.trimmed_mean import trimmed_mean

COLUMNS_AT_ONCE = 512
"""Number of channels that are in memory in float64 at a time."""


@dataclass(frozen=True)
class Moments:
    """Moments of a matrix's inputs over tokens."""

    count: int
    """Number of tokens."""
    mean: Tensor
    """(channels,), float64."""
    squares: Tensor
    """(channels,), float64: sum over tokens of the squared distance from the mean."""

    @staticmethod
    def of_sums(count: int, total: Tensor, square_sum: Tensor) -> "Moments":
        """Return the moments of inputs with these sums over tokens, both (channels,), float64.

        The difference of square sum and squared mean cancels digits: the variance has the relative
        error of float64 times the ratio of squared mean and variance.
        """
        mean = total / max(1, count)
        # Rounding can make the difference of a nearly constant channel negative.
        return Moments(count, mean, (square_sum - total * mean).clamp(min=0))

    @property
    def total(self) -> Tensor:
        """Sum over tokens of the input, (channels,), float64."""
        return self.mean * self.count

    @property
    def variance(self) -> Tensor:
        """Unbiased estimate of the variance, (channels,), float64; zero for one token."""
        return self.squares / max(1, self.count - 1)

    def counted(self, count: int, factor: float) -> "Moments":
        """Return the moments of ``count`` tokens with inputs that are ``factor`` times as large."""
        return Moments(count, self.mean * factor, self.squares * (factor**2 * count / self.count))

    @property
    def square_sum(self) -> Tensor:
        """Sum over tokens of the squared input, (channels,), float64."""
        return self.squares + self.count * self.mean.square()


def moments_of(inputs: Tensor) -> Moments:
    """Return the moments of inputs, (tokens, channels), any floating dtype, on the CPU."""
    means = []
    squares = []
    for columns in inputs.split(COLUMNS_AT_ONCE, dim=1):
        tokens = columns.to(torch.float64)
        # In float64, two passes: the mean is subtracted before squaring, so no digits cancel.
        means.append(tokens.mean(dim=0))
        squares.append(tokens.sub_(means[-1]).square_().sum(dim=0))
    return Moments(len(inputs), torch.cat(means).cpu(), torch.cat(squares).cpu())


def pooled(parts: Sequence[Moments]) -> Moments:
    """Return the moments of all parties' inputs together."""
    count = sum(part.count for part in parts)
    mean = torch.stack([part.mean * (part.count / count) for part in parts]).sum(dim=0)
    # Chan et al.: squares within each party, plus those of its mean around the pooled mean.
    squares = torch.stack(
        [part.squares + part.count * (part.mean - mean).square() for part in parts]
    ).sum(dim=0)
    return Moments(count, mean, squares)


def trimmed(parts: Sequence[Moments], trim: int) -> Moments:
    """Return moments that no ``trim`` parties can move beyond those of the others.

    In each channel the mean is the trimmed mean of the parties' means, and the variance that of
    their mean squared distances from this mean (``trimmed_mean``); parties are weighted by their
    numbers of tokens. Without trimming these are the moments of ``pooled``.
    """
    counts = [float(part.count) for part in parts]
    mean = trimmed_mean([part.mean for part in parts], counts, trim)
    # Each party's mean squared distance from the common mean, not from its own.
    distances = [part.squares / part.count + (part.mean - mean).square() for part in parts]
    count = sum(part.count for part in parts)
    return Moments(count, mean, trimmed_mean(distances, counts, trim) * count)


def limited_by_median(
    parts: Sequence[Moments], max_ratio: float
) -> tuple[list[Moments], list[float]]:
    """Limit each party's moments relative to those of the median party.

    The variance of every channel is limited to the range from 1 / ``max_ratio`` to ``max_ratio``
    times the median party's. The vector of means is measured in standard deviations of the median
    party. Its distance from the median means is limited to ``max_ratio`` times the median party's
    distance.

    Returns
    -------
    parts : list of Moments
        Moments of each party; unchanged for fewer than three parties and within the limits.
    excesses : list of float
        Factor by which each party's worst number exceeds its limit; 1 if none does.
    """
    # The median of one or two parties shows no outlier.
    if len(parts) < MIN_CLIENTS:
        return list(parts), [1.0] * len(parts)
    # 1. Limit the variance of each channel.
    variances = torch.stack([part.squares / part.count for part in parts])
    limited = within_ratio(variances, max_ratio)
    # 2. Limit the distance of the vector of means.
    means = torch.stack([part.mean for part in parts])
    centre = means.median(dim=0).values
    spread = variances.median(dim=0).values.sqrt()
    # A channel that is constant in the median party would otherwise give infinite distances.
    spread = spread.clamp(min=float(spread.mean()) * 1e-6)
    scaled = (means - centre) / spread.where(spread > 0, torch.ones(()).double())
    distances = scaled.square().mean(dim=1).sqrt().tolist()
    factors = clip_factors(dict(enumerate(distances)), max_ratio)
    # 3. Apply both limits; numbers within them keep their bits.
    moments = []
    excesses = []
    for place, part in enumerate(parts):
        beyond = variances[place] != limited[place]
        factor = factors[place]
        mean = part.mean if factor == 1 else centre + factor * (part.mean - centre)
        squares = torch.where(beyond, limited[place] * part.count, part.squares)
        moments.append(Moments(part.count, mean, squares))
        # Ratio of the larger to the smaller, so that too small a variance counts as an excess too.
        high = torch.maximum(variances[place], limited[place])
        low = torch.minimum(variances[place], limited[place]).clamp(min=1e-300)
        excess = float((high / low)[beyond].max()) if bool(beyond.any()) else 1.0
        excesses.append(max(1 / max(factor, 1e-15), excess))
    return moments, excesses


def channel_scores(moments: Moments, weight: Tensor) -> Tensor:
    """Return the importance of each input channel of a matrix (WIFV, equation 5).

    It is the variance of the channel times the squared norm of its column: (channels,), float64, on
    the CPU. ``weight`` is (out_features, channels).
    """
    # The norm's squares are summed in float64; one column can have very many rows.
    values = weight.to(torch.float32)
    return moments.variance * values.square().sum(dim=0, dtype=torch.float64).cpu()


def standardised(scores: Tensor) -> Tensor:
    """Return the scores with mean 0 and standard deviation 1 (section 3.3).

    If all are equal, they are zeros.
    """
    deviation = scores.std()
    return (scores - scores.mean()) / deviation if deviation > 0 else torch.zeros_like(scores)
