"""Data sets of an attack: those of clients, unused ones, and the attacker's reference text.

All come from one text whose passages were shuffled, so that they differ only in their passages. The
attacker knows the candidates: the samples of all clients and of the unused sets.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.membership.clients import Clients
from espalier.settings.run import RunSettings


@dataclass(frozen=True)
class DataSets:
    """Data sets with equally many samples each.

    ``clients`` deals ``used + unused + reference`` texts, in this order.
    """

    clients: Clients
    used: int
    """Number of clients that reply."""
    unused: int
    """Number of candidate sets on which no reply is based."""
    reference: int
    """Number of sets of which the attacker knows that nobody used them."""

    @property
    def samples(self) -> int:
        """Number of samples of a data set."""
        return self.clients.samples

    def candidates(self, run: RunSettings) -> list[Tensor]:
        """Return the samples of the used and the unused sets: (samples, tokens) each."""
        return [self.clients.known(run, number) for number in range(self.used + self.unused)]

    def references(self, run: RunSettings) -> list[Tensor]:
        """Return the samples of the reference sets."""
        return [self.clients.known(run, number) for number in self.reference_clients]

    @property
    def reference_clients(self) -> range:
        """Numbers of the clients whose text is the attacker's reference."""
        first = self.used + self.unused
        return range(first, first + self.reference)

    def members(self, together: int) -> Tensor:
        """Return which candidates a reply is based on: (replies, candidates), bool.

        ``together`` clients' replies are summed; 1 if each client's reply is seen.
        """
        replies = self.used // together
        sets = torch.zeros(replies, self.used + self.unused, dtype=torch.bool)
        for reply in range(replies):
            sets[reply, reply * together : (reply + 1) * together] = True
        return sets.repeat_interleave(self.samples, dim=1)
