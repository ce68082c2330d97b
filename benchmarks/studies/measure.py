"""Measurement of the cells of a study: perplexity on every evaluation text."""

import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import Tensor

from benchmarks.studies.cells import Cell, Setting
from benchmarks.studies.clients import Clients
from benchmarks.studies.rows import Row, Rows
from espalier.evaluation.perplexity import mean_losses, perplexity
from espalier.hf.stream.block_stream import BlockStream
from espalier.hf.stream.edits import Edits, masked
from espalier.settings.run import RunSettings, parse

LOCAL_CLIENTS = 8
"""Maximum number of clients with an evaluated local baseline; ``local-baseline`` is their mean."""


@dataclass
class Bench:
    """Common data of all cells of a study: dense model, evaluation texts and clients' text."""

    stream: BlockStream
    texts: Mapping[str, Tensor]
    common: Mapping[str, object]
    """Settings of the run that no study varies, flat."""
    published_ties: bool = False
    """True if ties are broken by the rules of the paper's code."""

    def settings(self, setting: Setting) -> RunSettings:
        """Return the settings of the run for the clients of a cell."""
        varied = {
            "seed": setting.seed,
            "num-clients": setting.clients,
            "data.num-samples": setting.samples,
            "pruning.sparsity": setting.sparsity,
            "pruning.comparison-group": setting.local_group,
        }
        return parse({**self.common, **varied})


def measure(bench: Bench, cells: Iterable[Cell], rows: Rows) -> None:
    """Measure every cell on the texts that ``rows`` lacks, and add the rows."""
    dense_losses: dict[str, float] = {}
    texts = {cell: rows.missing_texts(cell, bench.texts) for cell in cells}
    missing = [cell for cell, names in texts.items() if names]
    done = 0
    for setting, wanted in _by_setting(missing):
        with tempfile.TemporaryDirectory() as scratch:
            clients = Clients(
                bench.settings(setting), bench.stream, Path(scratch), bench.published_ties
            )
            for cell in wanted:
                wanted_texts = {name: bench.texts[name] for name in texts[cell]}
                if cell.method == "dense":
                    if not wanted_texts.keys() <= dense_losses.keys():
                        dense_losses |= mean_losses(bench.stream, wanted_texts)
                    found = {text: [perplexity(dense_losses[text])] for text in wanted_texts}
                    sparsity = 0.0
                else:
                    models, sparsity = _models(clients, cell)
                    found = _perplexities(bench, models, wanted_texts)
                rows.add_measured(
                    Row(cell, text, float(np.mean(values)), sparsity, len(values))
                    for text, values in found.items()
                )
                done += 1
                print(f"{done} of {len(missing)}: {cell}", flush=True)


def _by_setting(cells: Iterable[Cell]) -> Iterator[tuple[Setting, list[Cell]]]:
    grouped: dict[Setting, list[Cell]] = {}
    for cell in cells:
        grouped.setdefault(cell.setting, []).append(cell)
    yield from grouped.items()


def _models(clients: Clients, cell: Cell) -> tuple[list[Edits], float]:
    """Return the models of a cell, and the fraction of their prunable weights that is zero."""
    if cell.method in ("local-baseline", "centralized"):
        alone = clients.decide("one-shot", "layer").local_sparsity()
        if cell.method == "centralized":
            return [clients.centralized], alone
        numbers = np.linspace(
            0, cell.setting.clients - 1, min(LOCAL_CLIENTS, cell.setting.clients)
        ).astype(int)
        return [clients.local_baseline(client) for client in numbers], alone
    result = clients.decide(cell.method, cell.server_group)
    masks = (result.prune_masks(block.index) for block in clients.plan.blocks)
    zeros = sum(int(mask.sum()) for block in masks for mask in block.values())
    if cell.weight_scaling:
        zeros += result.zeros_beyond_masks()
    edits = result.edits if cell.weight_scaling else masked(result.prune_masks)
    return [edits], zeros / clients.plan.num_weights


def _perplexities(
    bench: Bench, models: Iterable[Edits], texts: Mapping[str, Tensor]
) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {text: [] for text in texts}
    for edits in models:
        for text, loss in mean_losses(bench.stream, texts, edits).items():
            found[text].append(perplexity(loss))
    return found
