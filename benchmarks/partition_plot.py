"""Partition of a task's items over clients: items per client and label, as stacked bars.

    python -m benchmarks.partition_plot --task sst2 --file sst2_train.jsonl --partition dirichlet
    --alpha 0.5 --clients 10

Needs the extra ``studies``. Each of the most common labels has its own colour; all others share
one.
"""

import argparse
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, get_args

from espalier.data.files.corpus_index import open_corpus
from espalier.data.partition import Kind, Partition
from espalier.data.tasks.catalogue import TASKS, task_named
from espalier.data.tasks.task_source import items_in
from espalier.errors import EspalierError
from espalier.results.style import OKABE_ITO, STUDY_WIDTH, new_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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


def plot(partitions: Mapping[str, Sequence[Counter[str]]], title: str, path: Path) -> None:
    """Write ``path`` as SVG and PNG: a panel per partition, a bar per client, colours for labels.

    Parameters
    ----------
    partitions : items of each client by label, by the panel's title
    """
    columns = min(2, len(partitions))
    lines = -(-len(partitions) // columns)
    labels = sorted(
        {label for counts in partitions.values() for count in counts for label in count},
        key=lambda label: (label == OTHERS, label),
    )
    with new_figure(90 + 220 * lines, STUDY_WIDTH) as figure:
        all_axes = figure.subplots(lines, columns, squeeze=False, sharey=True)
        for axes, (head, counts) in zip(all_axes.flat, partitions.items(), strict=False):
            _bars(axes, counts, labels)
            axes.set_title(head, size=10)
        for axes in list(all_axes.flat)[len(partitions) :]:
            axes.remove()
        for axes in all_axes[:, 0]:
            axes.set_ylabel("items")
        figure.suptitle(title, x=0.008, ha="left", weight="bold", size=12)
        if len(labels) > 1:
            shown = all_axes[0, 0].get_legend_handles_labels()
            figure.legend(*shown, loc="outside lower center", ncols=6, fontsize=9, title="label")
        save_figure(figure, path)


def _bars(axes: "Axes", counts: Sequence[Counter[str]], labels: Sequence[str]) -> None:
    below = [0] * len(counts)
    for number, label in enumerate(labels):
        heights = [count[label] for count in counts]
        colour = REST_COLOUR if label == OTHERS else OKABE_ITO[number % len(OKABE_ITO)]
        # A colour that serves a second label is hatched there.
        hatch = "//" if number >= len(OKABE_ITO) and label != OTHERS else ""
        axes.bar(
            range(len(counts)), heights, bottom=below, color=colour, width=0.8, label=label,
            hatch=hatch, edgecolor="white", linewidth=0.5,
        )  # fmt: skip
        below = [start + height for start, height in zip(below, heights, strict=True)]
    axes.set_xticks(range(len(counts)))
    axes.set_xlabel("client")
    axes.grid(axis="x", visible=False)


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
    plot({settings: counts}, f"{given.task}: {total:,} items", given.out)


if __name__ == "__main__":
    main()
