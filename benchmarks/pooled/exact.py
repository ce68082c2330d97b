"""Masks of pooled pruning, bit by bit, and masks by float64 sums of plain transformers' hooks.

The sums of clients go through the bytes that they would send. The plain loop
(``tests/hf/stream/plain_sums.py``) shares no code with the program. It runs the samples in batches
of the same size, and again one by one, because the forward pass itself may round differently in
other batches.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from espalier.hf.machine.computing import Computing
from espalier.hf.opening.opened_model import OpenedModel
from espalier.hf.stream.block_stream import BlockStream, apply_prune_masks, samples_per_batch
from espalier.hf.stream.pooled_sums import dense_sums, masks_by_sums, pack_sums, sums_in_block
from espalier.messages.tensor_blobs import views
from espalier.methods.pruning.pooled_pruning import PooledPruningSettings, squares_name
from espalier.models.plan import BlockPlan
from pruning_kernels.fixed_point import from_words, summed
from tests.hf.stream.plain_sums import matrices_of, plain_mask, plain_masks, plain_model, pooled

GROUPS = ("row", "layer", "column", "2:4")
METRICS = ("wanda", "ria")
WEIGHTINGS = ("tokens", "equal")
SPARSITY = 0.5
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    """Settings of one comparison."""

    strategy: str
    metric: str
    group: str
    weighting: str

    @property
    def settings(self) -> PooledPruningSettings:
        """Settings of the method."""
        group = {"pattern": self.group} if ":" in self.group else {"comparison_group": self.group}
        return PooledPruningSettings.model_validate(
            {
                "strategy": self.strategy,
                "metric": self.metric,
                "weighting": self.weighting,
                "sparsity": SPARSITY,
                **group,
            }
        )


@dataclass(frozen=True)
class Finding:
    """Result of one comparison."""

    case: Case
    bits: int
    """Number of mask bits."""
    differing: int
    """Number of bits that differ from float64 sums over the same batches."""
    differing_one_by_one: int | None
    """Number of bits that differ if samples run one by one; None if it was not measured."""


def one_shot(directory: Path, clients: Sequence[Tensor]) -> Iterator[Finding]:
    """Compare all groups, metrics and weightings of masks by one pass through the dense model."""
    opened = OpenedModel(directory)
    model = plain_model(directory)
    at_once = samples_per_batch(clients[0].shape[1])
    for weighting in WEIGHTINGS:
        sent = _sent_dense(opened, clients, weighting)
        plain = {number: pooled(model, clients, weighting, number) for number in {at_once, 1}}
        for metric in METRICS:
            for group in GROUPS:
                case = Case("one-shot", metric, group, weighting)
                found = _masks(opened, sent, case)
                differing = {
                    number: _differing(
                        found,
                        {
                            name: plain_mask(module.weight, sums[name], metric, group, SPARSITY)
                            for block in matrices_of(model)
                            for name, module in block.items()
                        },
                    )
                    for number, sums in plain.items()
                }
                bits = opened.plan.num_weights
                yield Finding(case, bits, differing[at_once], differing[1])


def iterative(
    directory: Path, clients: Sequence[Tensor], pairs: Iterable[tuple[str, str]]
) -> Iterator[Finding]:
    """Compare masks of sequential pruning for some pairs of metric and group."""
    opened = OpenedModel(directory)
    at_once = samples_per_batch(clients[0].shape[1])
    for metric, group in pairs:
        case = Case("iterative", metric, group, "tokens")
        expected = plain_masks(
            directory,
            clients,
            metric,
            group,
            SPARSITY,
            "tokens",
            sequential=True,
            per_batch=at_once,
        )
        found = _sequential(opened, clients, case.settings)
        yield Finding(case, opened.plan.num_weights, _differing(found, expected), None)


def _received(
    block: BlockPlan, blobs: Sequence[bytes], job: PooledPruningSettings
) -> dict[str, Tensor]:
    """Return the sums of a block from the clients' blobs, as the server adds them."""
    words = [views(blob) for blob in blobs]
    return {
        name.removesuffix(squares_name("")): from_words(
            summed([own[name] for own in words]), job.fraction_bits
        )
        for name in words[0]
        if name.endswith(squares_name(""))
    }


def _sent_dense(
    opened: OpenedModel, clients: Sequence[Tensor], weighting: str
) -> list[dict[str, Tensor]]:
    stream = BlockStream(opened, Computing(CPU, torch.float32, torch.get_num_threads()))
    job = Case("one-shot", "wanda", "row", weighting).settings
    blobs = [
        [
            pack_sums(stream, index, sums, samples.numel(), job)
            for index, sums in enumerate(dense_sums(stream, samples))
        ]
        for samples in clients
    ]
    return [
        _received(block, [own[block.index] for own in blobs], job) for block in opened.plan.blocks
    ]


def _masks(
    opened: OpenedModel, sums: Sequence[Mapping[str, Tensor]], case: Case
) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for block in opened.plan.blocks:
        masks = masks_by_sums(opened, block, sums[block.index], case.settings, CPU)
        found |= {block.linear(name).parameter: mask for name, mask in masks.items()}
    return found


@torch.no_grad()
def _sequential(
    opened: OpenedModel, clients: Sequence[Tensor], job: PooledPruningSettings
) -> dict[str, Tensor]:
    stream = BlockStream(opened, Computing(CPU, torch.float32, torch.get_num_threads()))
    walks = [stream.start(samples) for samples in clients]
    found: dict[str, Tensor] = {}
    for block in opened.plan.blocks:
        blobs = [
            pack_sums(
                stream, block.index, sums_in_block(stream, walk, block.index), walk.num_tokens, job
            )
            for walk in walks
        ]
        masks = masks_by_sums(opened, block, _received(block, blobs, job), job, CPU)
        with stream.block(block.index) as loaded:
            apply_prune_masks(stream.linears(block.index, loaded), masks)
            for walk in walks:
                walk.through(block.index, loaded)
        found |= {block.linear(name).parameter: mask for name, mask in masks.items()}
    return found


def _differing(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> int:
    assert found.keys() == expected.keys()
    return sum(int(np.count_nonzero((found[name] != expected[name]).numpy())) for name in found)
