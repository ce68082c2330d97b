"""Partition of one dataset among simulated clients.

The client of a record depends on the record, its label and the run's seed, not on the order of the
file. A hash of the text is a point in [0, 1), and each client owns an interval. The intervals have
equal lengths (``iid``), random lengths (``quantity``), or random lengths per label (``dirichlet``).
``by-field`` assigns whole labels to clients, ``by-group`` whole groups, whose hashes are labels.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from espalier.amounts import count
from espalier.data.passages import digest
from espalier.errors import InputError
from espalier.seeds import derive_seed

Kind = Literal["iid", "by-field", "by-group", "dirichlet", "quantity"]


@dataclass(frozen=True)
class Partition:
    """Rule that assigns records to ``num_clients`` clients.

    ``alpha`` is the concentration of the Dirichlet distributions: small values give uneven
    partitions, large values even ones.
    """

    kind: Kind
    num_clients: int
    alpha: float
    seed: int

    def require_enough(self, labels: Sequence[str]) -> None:
        """Refuse data that have fewer labels or groups than clients that get whole ones.

        Raises InputError if a client would get none.
        """
        if self.kind in ("by-field", "by-group") and len(labels) < self.num_clients:
            of = "label" if self.kind == "by-field" else "group"
            there = "there is" if len(labels) == 1 else "there are"
            raise InputError(
                f"data.partition = '{self.kind}': {there} {count(len(labels), of)} for"
                f" num-clients = {self.num_clients}; lower num-clients, or choose another partition"
            )

    def select(self, client: int, texts: Sequence[str]) -> list[str]:
        """Return the texts of one client, in their order; all have the same label."""
        points = np.array([point_of(digest(text)) for text in texts], np.uint64)
        is_mine = self.chooser(client, [""])
        return list(compress(texts, is_mine(points, np.zeros(len(texts), np.uint32))))

    def chooser(
        self, client: int, labels: Iterable[str]
    ) -> Callable[[NDArray[np.uint64], NDArray[np.uint32]], NDArray[np.bool_]]:
        """Return a function that selects the records of one client.

        The selections of all clients are disjoint and contain all records.

        Parameters
        ----------
        labels : all labels that occur

        Returns
        -------
        callable
            Maps the point of each record (see ``point_of``) and the index of its label to a bool
            array that is True for the client's records.
        """
        names = list(labels)
        if self.kind in ("by-field", "by-group"):
            # In alphabetical order, so that the order of the file does not matter.
            order = {label: place for place, label in enumerate(sorted(names))}
            chosen = np.array([order[label] % self.num_clients == client for label in names])
            return lambda points, of: chosen[of]
        ends: dict[int, NDArray[np.float64]] = {}

        def is_mine(points: NDArray[np.uint64], of: NDArray[np.uint32]) -> NDArray[np.bool_]:
            mine = np.zeros(len(points), dtype=bool)
            for label in np.unique(of).tolist():
                if label not in ends:
                    ends[label] = self._ends(names[label])
                here = of == label
                owners = np.searchsorted(
                    ends[label], points[here].astype(np.float64) / 2.0**64, side="right"
                )
                # A point close to 1 can be rounded to 1, which lies beyond the last end.
                mine[here] = np.minimum(owners, self.num_clients - 1) == client
            return mine

        return is_mine

    def _ends(self, label: str) -> NDArray[np.float64]:
        """Return the end of each client's interval for a label: (num_clients,), ascending."""
        if self.kind == "iid":
            shares: Sequence[float] | NDArray[np.float64] = [
                1 / self.num_clients
            ] * self.num_clients
        else:
            purpose = f"partition/{label}" if self.kind == "dirichlet" else "partition"
            generator = np.random.default_rng(derive_seed(self.seed, purpose))
            shares = generator.dirichlet([self.alpha] * self.num_clients)
        ends = np.cumsum(shares)
        # The sum is rounded, and the last interval must reach 1.
        ends[-1] = 1.0
        return ends


def point_of(record_digest: bytes) -> int:
    """Return the partition point of a record, in units of 2**-64, given its hash."""
    return int.from_bytes(record_digest[8:16], "big")
