"""Partition of a task's items over clients: items per client and label, as stacked bars.

    python -m benchmarks.partition_plot --task sst2 --file sst2_train.jsonl --partition dirichlet
    --alpha 0.5 --clients 10

Needs the extra ``studies``. Each of the most common labels has its own colour; all others share
one.
"""

import argparse
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import get_args

from espalier.data.files.corpus_index import open_corpus
from espalier.data.partition import Kind, Partition
from espalier.data.tasks.catalogue import TASKS, task_named
from espalier.data.tasks.reading import items_in
from espalier.errors import EspalierError

MAX_LABELS = 10
OTHERS = "all others"
REST_COLOUR = "lightgrey"
NO_LABEL = "items"


def counts_per_client(partition: Partition, path: str, task: str) -> list[Counter[str]]:
    """Return the items of each client by label, with rare labels merged."""
    with TemporaryDirectory() as folder:
        corpus = open_corpus(items_in(task_named(task), path, "--file"), Path(folder))
        shares = [corpus.share(partition, client) for client in range(partition.num_clients)]
        counts = [
            Counter(item.label or NO_LABEL for part in share for item in part) for share in shares
        ]
    total: Counter[str] = sum(counts, Counter())
    shown = {label for label, _ in total.most_common(MAX_LABELS)}
    merged = []
    for count in counts:
        rest = sum(number for label, number in count.items() if label not in shown)
        kept = Counter({label: number for label, number in count.items() if label in shown})
        merged.append(kept + Counter({OTHERS: rest}))
    return merged


def plot(counts: Sequence[Counter[str]], title: str, path: Path) -> None:
    """Write a PNG with one bar per client and one segment per label."""
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(5.0, 2.5 + 0.45 * len(counts)), 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    labels = sorted(
        {label for count in counts for label in count}, key=lambda label: (label == OTHERS, label)
    )
    below = [0] * len(counts)
    colours = iter(colormaps["tab10"].colors)  # type: ignore[attr-defined]
    for label in labels:
        heights = [count[label] for count in counts]
        colour = REST_COLOUR if label == OTHERS else next(colours)
        axes.bar(range(len(counts)), heights, bottom=below, color=colour, width=0.8, label=label)
        below = [start + height for start, height in zip(below, heights, strict=True)]
    axes.set_xticks(range(len(counts)))
    axes.set_xlabel("client")
    axes.set_ylabel("items")
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    axes.set_title(title, fontsize=10)
    if len(labels) > 1:
        figure.legend(loc="outside right upper", fontsize=8)
    figure.savefig(path, dpi=120, metadata={"Software": None})


def main(arguments: Sequence[str] | None = None) -> None:
    """Partition the items and plot the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--task", required=True, choices=list(TASKS))
    parser.add_argument("--file", required=True, help="JSON Lines")
    parser.add_argument("--partition", default="dirichlet", choices=get_args(Kind))
    parser.add_argument("--alpha", type=float, default=0.5)
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("partition.png"))
    given = parser.parse_args(arguments)
    if given.clients < 1 or not given.alpha > 0:
        parser.error("--clients must be at least 1, and --alpha greater than 0")
    partition = Partition(given.partition, given.clients, given.alpha, given.seed)
    try:
        counts = counts_per_client(partition, given.file, given.task)
    except EspalierError as error:
        parser.error(str(error))
    alpha = f", alpha {given.alpha:g}" if given.partition in ("dirichlet", "quantity") else ""
    total = sum(count.total() for count in counts)
    settings = f"{given.partition}{alpha}, {given.clients} clients, seed {given.seed}"
    plot(counts, f"{given.task}: {total:,} items\n{settings}", given.out)


if __name__ == "__main__":
    main()
