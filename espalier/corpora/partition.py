"""How one body of text is dealt out to simulated clients.

Which client receives a record depends on the record, its label and the run's seed, never on the order of the file: a hash
of the text is a point in [0, 1), and each client owns a stretch of that line. The stretches are equal (``iid``), of random
lengths (``quantity``), or of random lengths for each label (``dirichlet``); ``by-field`` gives whole labels to clients.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from espalier.corpora.passages import digest
from espalier.settings.seeds import derive_seed

Kind = Literal["iid", "by-field", "dirichlet", "quantity"]


class Labelled(Protocol):
    """What can be dealt out: a text, whose hash decides, and its label; a ``Record``, or an item of a task."""

    @property
    def text(self) -> str:
        """What is hashed."""

    @property
    def label(self) -> str:
        """By which ``by-field`` and ``dirichlet`` deal."""


L = TypeVar("L", bound=Labelled)


@dataclass(frozen=True)
class Partition:
    """A rule by which records are dealt out to ``num_clients`` clients.

    ``alpha`` is the concentration of the Dirichlet distributions: small values give uneven shares, large ones even shares.
    """

    kind: Kind
    num_clients: int
    alpha: float
    seed: int

    def share_of(self, rank: int, records: Iterable[L]) -> list[L]:
        """The records of one client, in their order; the shares of all clients are disjoint and complete."""
        records = list(records)
        if self.kind == "by-field":
            labels = sorted({record.label for record in records})
            mine = {label for place, label in enumerate(labels) if place % self.num_clients == rank}
            return [record for record in records if record.label in mine]
        ends = {label: self._ends(label) for label in {record.label for record in records}}
        return [record for record in records if _owner(record, ends[record.label]) == rank]

    def _ends(self, label: str) -> NDArray[np.float64]:
        """Where each client's stretch of [0, 1) ends, for records of a label: (num_clients,), ascending."""
        if self.kind == "iid":
            shares: Sequence[float] | NDArray[np.float64] = [1 / self.num_clients] * self.num_clients
        else:
            purpose = f"partition/{label}" if self.kind == "dirichlet" else "partition"
            generator = np.random.default_rng(derive_seed(self.seed, purpose))
            shares = generator.dirichlet([self.alpha] * self.num_clients)
        ends = np.cumsum(shares)
        ends[-1] = 1.0
        return ends


def _owner(record: Labelled, ends: NDArray[np.float64]) -> int:
    point = int.from_bytes(digest(record.text)[8:16], "big") / 2**64
    return min(int(np.searchsorted(ends, point, side="right")), len(ends) - 1)
