"""Partition of one dataset among simulated clients by a partitioner of ``flwr-datasets``.

The partitioner gets one row per record, in the order of the files, with the record's number and its
label or group. It never gets the text, so memory does not depend on the length of the records.
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from espalier.data.files.compression import import_library
from espalier.errors import EspalierError, InputError, first_line
from espalier.seeds import derive_seed

EXTRA = "partitioners"
"""Extra of the installation that contains flwr-datasets."""
ROW = "row"
"""Column with the number of the record."""
NOBODY = -1
UNFIT = {
    "Partitioner",
    "DistributionPartitioner",
    "IdToSizeFncPartitioner",
    "VerticalEvenPartitioner",
    "VerticalSizePartitioner",
}
"""Classes that are abstract, need a function or an array as an argument, or divide columns."""


@dataclass(frozen=True)
class FlowerPartition:
    """Partitioner that divides records among ``num_clients`` clients.

    Client i gets partition i. Records of further partitions, or of none, belong to no client.
    """

    name: str
    """Name of the class in ``flwr_datasets.partitioner``."""
    arguments: Mapping[str, Any]
    """Arguments of the class, without the number of partitions and the column."""
    num_clients: int
    seed: int
    """Seed of the run, from which the partitioner's is derived unless ``arguments`` has one."""
    grouped: bool
    """Whether labels are groups, which must not be divided."""

    def records_of(
        self, client: int, labels: NDArray[np.uint32], names: Sequence[str]
    ) -> NDArray[np.int64]:
        """Return the numbers of a client's records, ascending.

        Raises InputError if flwr-datasets is not installed or has no such partitioner, the
        arguments are wrong, records have no labels, or the partitioner gives a record to two
        clients or divides a group.

        Parameters
        ----------
        labels : index of each record's label or group: (records,)
        names : all labels
        """
        column = "group" if self.grouped else "label"
        kind = self._kind()
        accepted = inspect.signature(kind).parameters
        if "partition_by" in accepted and "" in names:
            raise self._wrong(
                "needs a label for each record; name the field with data.partition-field, or choose"
                " another partitioner"
            )
        own = {
            "num_partitions": self.num_clients,
            "partition_by": column,
            "seed": derive_seed(self.seed, "partition"),
        }
        # Only what the class accepts; the run's own arguments take precedence.
        given = {name: value for name, value in own.items() if name in accepted}
        columns = {ROW: np.arange(len(labels)), column: values_of(names)[labels]}
        owners = np.full(len(labels), NOBODY)
        try:
            partitioner = kind(**(given | dict(self.arguments)))
            partitioner.dataset = import_library("datasets", EXTRA).Dataset.from_dict(columns)
            number = partitioner.num_partitions
            for other in range(min(number, self.num_clients)):
                rows = np.asarray(partitioner.load_partition(other)[ROW], dtype=np.int64)
                if (owners[rows] != NOBODY).any():
                    raise self._wrong("gives a record to two clients; choose another partitioner")
                owners[rows] = other
        except EspalierError:
            raise
        # The library raises errors of many types for arguments that do not fit the data.
        except Exception as error:
            fixed = ("num_partitions", "partition_by")
            takes = ", ".join(name for name in accepted if name not in fixed) or "none"
            raise self._wrong(
                f"{type(error).__name__}: {first_line(error)}; correct data.partition-arguments"
                f" (there are: {takes})"
            ) from error
        if number < self.num_clients:
            raise self._wrong(
                f"makes {number} partitions, but num-clients = {self.num_clients}; set num-clients"
                f" to {number} or less"
            )
        taken = owners != NOBODY
        # (2, pairs): one pair per group if no group is divided.
        pairs = np.unique(np.stack([labels[taken], owners[taken]]), axis=1)
        if self.grouped and pairs.shape[1] > len(np.unique(labels[taken])):
            raise self._wrong(
                "divides a group of data.group among clients; choose a partitioner that keeps"
                " groups together, such as GroupedNaturalIdPartitioner, or 'by-group'"
            )
        return np.flatnonzero(owners == client)

    def _kind(self) -> Any:
        """Return the class of the partitioner."""
        known = import_library("flwr_datasets.partitioner", EXTRA)
        names = sorted(set(known.__all__) - UNFIT)
        if self.name not in names:
            raise self._wrong(
                "flwr-datasets has no such partitioner of records; choose one of"
                f" {', '.join(names)}"
            )
        return getattr(known, self.name)

    def _wrong(self, why: str) -> EspalierError:
        return InputError(f"data.partition = 'flwr:{self.name}': {why}")


def values_of(names: Sequence[str]) -> NDArray[np.float64] | NDArray[np.int64]:
    """Return a number for each label, in the order in which partitioners sort the labels.

    Labels that are different numbers stand for themselves, and others for their place in the
    alphabet.
    """
    try:
        numbers = np.array([float(name) for name in names])
    except ValueError:
        numbers = np.full(len(names), np.nan)
    if np.isfinite(numbers).all() and len(np.unique(numbers)) == len(names):
        return numbers
    places = {name: place for place, name in enumerate(sorted(names))}
    return np.array([places[name] for name in names])
