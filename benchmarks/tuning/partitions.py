"""Figure of the distributions of classes over clients in the study of an encoder."""

from collections import Counter
from pathlib import Path

from benchmarks.partition_plot import plot
from benchmarks.reporting.panels import heading_of
from benchmarks.reporting.rows import Rows

PARTITIONS = "tuning-encoder-partitions"
PARTITION_KEYS = ("alpha", "client", "label")
PARTITION_FIGURES = ("items",)


def plot_partitions(rows: Rows, path: Path) -> None:
    """Write ``path`` as a figure with a panel per alpha."""
    partitions: dict[str, list[Counter[str]]] = {}
    for row in rows.rows:
        counts = partitions.setdefault(f"alpha {row['alpha']}", [])
        client = int(row["client"])
        counts += [Counter[str]() for _ in range(client + 1 - len(counts))]
        counts[client][row["label"]] = int(row["items"])
    task = rows.conditions["task"]
    plot(partitions, heading_of(path, f"{task}: items of each client by class"), path)
