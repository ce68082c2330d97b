"""Attacks on replies that are computed from calibration samples without training.

The attacker has the program. It computes from each candidate sample what a client with only this
sample would send, and compares it with the reply.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from benchmarks.leakage.data_sets import DataSets
from benchmarks.leakage.figures import Figures, figures
from benchmarks.leakage.likelihood import scores_of
from benchmarks.leakage.noise import clipped, private_means
from benchmarks.membership.kinds import STATISTICS, Statistics
from espalier.hf.group_scores.streamline import stretch_cosines
from espalier.hf.group_scores.taylor import pack_scores, taylor_scores
from espalier.hf.machine.computing import Computing
from espalier.hf.opening.opened_model import OpenedModel
from espalier.hf.stream.block_stream import BlockStream
from espalier.hf.stream.input_statistics import pack_statistics, read_statistics
from espalier.hf.stream.pooled_sums import dense_sums, pack_sums, unpack_sums
from espalier.methods.pruning.llm_pruner import LlmPrunerSettings
from espalier.methods.pruning.llm_streamline import COSINES, LlmStreamlineSettings
from espalier.methods.pruning.pooled_pruning import PooledPruningSettings
from espalier.settings.run import RunSettings, parse

MOST_NUMBERS = 1 << 14
"""Numbers of a place that the attacker looks at; of more, it takes every second, third, ..."""
MOST_BITS = 1 << 17
"""The same for bits."""
POOLED = "pooled pruning, sums"
DP_SGD = (1.0, 2.0, 4.0, 8.0)
"""Epsilons of the program's own DP-SGD."""
EPSILONS = (*DP_SGD, float("inf"))
"""Epsilons of the emulation; infinity: clipped, without noise."""


def _sums(stream: BlockStream, samples: Tensor, run: RunSettings) -> Iterator[bytes]:
    job = run.of(PooledPruningSettings)
    for index, sums in enumerate(dense_sums(stream, samples)):
        yield pack_sums(stream, index, sums, samples.numel(), job)


def _read_sums(model: OpenedModel, place: int, blob: bytes, tokens: int) -> Tensor:
    found = unpack_sums(model.plan.blocks[place], blob, PooledPruningSettings())
    return torch.cat([values / tokens for values in found.values()])


def _scores(stream: BlockStream, samples: Tensor, run: RunSettings) -> Iterator[bytes]:
    job = run.of(LlmPrunerSettings)
    # A client divides by the number of samples that the run asks for.
    found = taylor_scores(stream.model, stream.computing, samples, job, run.data.num_samples)
    return map(pack_scores, found.values())


def _read_all(_: OpenedModel, __: int, blob: bytes, ___: int) -> Tensor:
    return torch.cat([value.flatten() for value in read_statistics(blob).values()])


def _cosines(stream: BlockStream, samples: Tensor, run: RunSettings) -> Iterator[bytes]:
    job = run.of(LlmStreamlineSettings)
    span = job.span(len(stream.model.plan.blocks))
    found = stretch_cosines(stream, samples, span, after_norm=job.compares_after_norm)
    yield pack_statistics({COSINES: found})


KINDS: dict[str, Statistics] = {
    **STATISTICS,
    POOLED: Statistics({"method": "pooled-pruning"}, _sums, _read_sums),
    "LLM-Pruner, scores": Statistics({"method": "llm-pruner"}, _scores, _read_all),
    "LLM-Streamline, similarities": Statistics({"method": "llm-streamline"}, _cosines, _read_all),
}
"""Kinds of replies by name."""

Numbers = list[Tensor]
"""Numbers of several parties by place: (parties, numbers) each."""


def numbers_of(
    kind: Statistics,
    stream: BlockStream,
    run: RunSettings,
    texts: Sequence[Tensor],
) -> Numbers:
    """Return what a client would send for each of some sample sets, by place of the model.

    ``texts`` has (samples, tokens) for each party.
    """
    found: list[list[Tensor]] = []
    for samples in texts:
        blobs = kind.recompute(stream, samples, run)
        for place, blob in enumerate(blobs):
            own = kind.read(stream.model, place, blob, samples.numel())
            most = MOST_BITS if own.dtype == torch.bool else MOST_NUMBERS
            own = own[:: -(-len(own) // most)]
            if place == len(found):
                found.append([])
            found[place].append(own if own.dtype == torch.bool else own.float())
    return [torch.stack(own) for own in found]


class StatisticsAttack:
    """Attack on one kind of reply: the numbers of replies, candidates and reference samples."""

    def __init__(self, sets: DataSets, kind: Statistics, computing: Computing) -> None:
        run = parse(sets.clients.settings(kind.method))
        stream = BlockStream(sets.clients.opened, computing)
        self.sets = sets
        candidates = sets.candidates(run)
        references = sets.references(run)
        make: Callable[[Sequence[Tensor]], Numbers] = lambda texts: numbers_of(  # noqa: E731
            kind, stream, run, texts
        )
        self.replies = make(candidates[: sets.used])
        """Replies of the clients, computed from their samples as the clients' program does."""
        self.known = make([sample[None] for own in candidates for sample in own])
        self.reference = make([sample[None] for own in references for sample in own])
        self.of_references = [own.float().mean(dim=0) for own in make(references)]

    def alone(self) -> Figures:
        """Attack every client's reply."""
        return self._figures([own.float() for own in self.replies], self.sets.members(1))

    def summed(self, together: int) -> Figures:
        """Attack the mean of the replies of several clients, which a secure sum shows."""
        means = [own.float().view(-1, together, own.shape[1]).mean(dim=1) for own in self.replies]
        return self._figures(means, self.sets.members(together))

    def _figures(self, replies: Numbers, members: Tensor) -> Figures:
        places = zip(replies, self.known, self.reference, self.of_references, strict=True)
        return figures(scores_of(places), members, self.sets.samples)

    def private(self, together: int, epsilon: float, seed: int = 0) -> Figures:
        """Attack means of clipped vectors with the noise of an epsilon, all places together.

        The noise is that of the whole sum, as if the clients shared it.
        """
        known = torch.cat([own.float() for own in self.known], dim=1)
        reference = torch.cat([own.float() for own in self.reference], dim=1)
        scale = reference.std(dim=0).clamp(min=1e-12)
        bound = float((reference / scale).norm(dim=1).median())
        used = self.sets.used * self.sets.samples
        groups = known[:used].view(-1, together * self.sets.samples, known.shape[1])
        generator = torch.Generator().manual_seed(seed)
        replies = private_means(groups, scale, bound, epsilon, generator)
        reference = clipped(reference, scale, bound)
        known = clipped(known, scale, bound)
        scores = scores_of([(replies, known, reference, reference.mean(dim=0))])
        return figures(scores, self.sets.members(together), self.sets.samples)
