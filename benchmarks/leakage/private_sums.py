"""Attack on pooled pruning with differential privacy: the noisy sums of the app.

A record is one sample. Each counts with norm 1, and clients add discrete Gaussian noise. A secure
sum has the noise of one client, of which every client adds an equal share.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from benchmarks.leakage.data_sets import DataSets
from benchmarks.leakage.figures import Figures, figures
from benchmarks.leakage.likelihood import scores_of
from benchmarks.leakage.statistics import Numbers, StatisticsAttack, read_all
from benchmarks.membership.kinds import Statistics
from espalier.hf.machine.computing import Computing
from espalier.hf.opening.opened_model import OpenedModel
from espalier.hf.stream.block_stream import BlockStream
from espalier.hf.stream.private_sums import PrivateSums
from espalier.messages.tensor_blobs import views
from espalier.methods.pruning.pooled_pruning import num_inputs, shared_inputs, squares_name
from espalier.privacy.guarantee import guarantee_of
from espalier.privacy.noise import Integers, RandomBits, SeededBits
from espalier.settings.run import RunSettings, parse
from pruning_kernels.fixed_point import RECORD_BITS, from_words

METHOD = {"method": "pooled-pruning"}


class NoNoise(SeededBits):
    """Source of noise that is always 0, as the attacker computes sums."""

    def grid_noise(self, number: int, deviation: float) -> Integers:
        """Return zeros."""
        return np.zeros(number, np.int64)


def _blobs(
    stream: BlockStream, samples: Tensor, multiplier: float, bits: RandomBits
) -> Iterator[bytes]:
    lengths = torch.full((len(samples),), samples.shape[1])
    return PrivateSums(stream, multiplier, bits).blobs(samples, lengths, range(len(samples)))


def _exact(stream: BlockStream, samples: Tensor, _: RunSettings) -> Iterator[bytes]:
    return _blobs(stream, samples, 0.0, NoNoise(0, 0, 0))


def _read(model: OpenedModel, place: int, blob: bytes, tokens: int) -> Tensor:
    words = views(blob)
    names = sorted(set(shared_inputs(model.plan.blocks[place]).values()))
    sums = [from_words(words[squares_name(name)], RECORD_BITS) for name in names]
    return torch.cat(sums) / tokens


PRIVATE = Statistics(METHOD, _exact, _read)


@dataclass
class PrivateSumsAttack:
    """Attack on the sums with noise; without noise it is ``exact``."""

    sets: DataSets
    computing: Computing

    def __post_init__(self) -> None:
        self.exact = StatisticsAttack(self.sets, PRIVATE, self.computing)

    def noise_multiplier(self, epsilon: float) -> float:
        """Return the noise multiplier of the app for a run of this epsilon."""
        settings = {
            **METHOD,
            "privacy.epsilon": epsilon,
            "privacy.noise": "seed",
            "evaluation.local-baseline": False,
        }
        guarantee = guarantee_of(parse(self.sets.clients.settings(settings)))
        assert guarantee is not None
        return guarantee.site_multiplier

    def noisy(self, together: int, epsilon: float, seed: int) -> Figures:
        """Attack replies, or sums of several clients' replies, with the noise of an epsilon."""
        multiplier = self.noise_multiplier(epsilon)
        sets = self.sets
        stream = self.exact.stream
        run = parse(sets.clients.settings(METHOD))
        replies: Numbers = read_all(
            PRIVATE,
            stream.model,
            (
                (
                    _blobs(
                        stream,
                        samples,
                        multiplier / math.sqrt(together),
                        SeededBits(seed, client, 1),
                    ),
                    samples.numel(),
                )
                for client, samples in enumerate(sets.candidates(run)[: sets.used])
            ),
        )
        means = [own.view(-1, together, own.shape[1]).mean(dim=1) for own in replies]
        # Numbers are divided by tokens, and a reply is the mean of many samples.
        tokens = sets.clients.tokens
        deviation = multiplier * math.sqrt(num_inputs(stream.model.plan)) / tokens
        noise = deviation**2 / (together * sets.samples)
        exact = self.exact
        places = zip(means, exact.known, exact.reference, exact.of_references, strict=True)
        return figures(scores_of(places, noise), sets.members(together), sets.samples)
