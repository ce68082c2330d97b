"""Attack on replies that are computed from calibration samples without training.

The attacker has the program. It computes from each candidate sample what a client with only this
sample would send, and compares it with the reply.
"""

from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from benchmarks.leakage.data_sets import DataSets
from benchmarks.leakage.figures import Figures, figures
from benchmarks.leakage.likelihood import scores_of
from benchmarks.membership.kinds import Statistics
from espalier.hf.machine.computing import Computing
from espalier.hf.opening.opened_model import OpenedModel
from espalier.hf.stream.block_stream import BlockStream
from espalier.settings.run import RunSettings, parse

MOST_NUMBERS = 1 << 14
"""Numbers of a place that the attacker looks at; of more, it takes every second, third, ..."""
MOST_BITS = 1 << 17
"""The same for bits."""

Numbers = list[Tensor]
"""Numbers of several parties by place: (parties, numbers) each."""


def numbers_of(
    kind: Statistics, stream: BlockStream, run: RunSettings, texts: Sequence[Tensor]
) -> Numbers:
    """Return what a client would send for each of some sample sets, by place of the model.

    ``texts`` has (samples, tokens) for each party.
    """
    return read_all(
        kind,
        stream.model,
        ((kind.recompute(stream, samples, run), samples.numel()) for samples in texts),
    )


def read_all(
    kind: Statistics, model: OpenedModel, replies: Iterable[tuple[Iterable[bytes], int]]
) -> Numbers:
    """Return the numbers in the blobs of some replies, each of which has a number of tokens."""
    found: list[list[Tensor]] = []
    for blobs, tokens in replies:
        for place, blob in enumerate(blobs):
            own = kind.read(model, place, blob, tokens)
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
        self.stream = stream
        candidates = sets.candidates(run)
        references = sets.references(run)
        make = partial(numbers_of, kind, stream, run)
        # Most replies are computed as the clients' program does; others come from the clients.
        self.replies = (
            make(candidates[: sets.used])
            if kind.sent is None
            else read_all(
                kind,
                stream.model,
                (
                    (blobs, own.numel())
                    for blobs, own in zip(
                        kind.sent(sets.clients, range(sets.used)), candidates, strict=False
                    )
                ),
            )
        )
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
