"""Kinds of replies that the attacker computes from known samples, by name."""

from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks.leakage.fedspine import FEDSPINE
from benchmarks.membership.kinds import STATISTICS, Statistics
from espalier.hf.group_scores.streamline import stretch_cosines
from espalier.hf.group_scores.taylor import pack_scores, taylor_scores
from espalier.hf.opening.opened_model import OpenedModel
from espalier.hf.stream.block_stream import BlockStream
from espalier.hf.stream.input_statistics import pack_statistics, read_statistics
from espalier.hf.stream.pooled_sums import dense_sums, pack_sums, unpack_sums
from espalier.methods.pruning.llm_pruner import LlmPrunerSettings
from espalier.methods.pruning.llm_streamline import COSINES, LlmStreamlineSettings
from espalier.methods.pruning.pooled_pruning import PooledPruningSettings
from espalier.settings.run import RunSettings

POOLED = "pooled pruning, sums"


def _sums(stream: BlockStream, samples: Tensor, run: RunSettings) -> Iterator[bytes]:
    job = run.of(PooledPruningSettings)
    for index, sums in enumerate(dense_sums(stream, samples)):
        yield pack_sums(stream, index, sums, samples.numel(), job)


def _read_sums(model: OpenedModel, place: int, blob: bytes, tokens: int) -> Tensor:
    found = unpack_sums(model.plan.blocks[place], blob, PooledPruningSettings())
    return torch.cat([values / tokens for values in found.values()])


def _scores(stream: BlockStream, samples: Tensor, run: RunSettings) -> Iterator[bytes]:
    job = run.of(LlmPrunerSettings)
    # A client divides by the number of samples that the run asks for.
    found = taylor_scores(stream.model, stream.computing, samples, job, run.data.num_samples)
    return map(pack_scores, found.values())


def _read_all(_: OpenedModel, __: int, blob: bytes, ___: int) -> Tensor:
    return torch.cat([value.flatten() for value in read_statistics(blob).values()])


def _cosines(stream: BlockStream, samples: Tensor, run: RunSettings) -> Iterator[bytes]:
    job = run.of(LlmStreamlineSettings)
    span = job.span(len(stream.model.plan.blocks))
    found = stretch_cosines(stream, samples, span, after_norm=job.compares_after_norm)
    yield pack_statistics({COSINES: found})


KINDS: dict[str, Statistics] = {
    **STATISTICS,
    POOLED: Statistics({"method": "pooled-pruning"}, _sums, _read_sums),
    "LLM-Pruner, scores": Statistics({"method": "llm-pruner"}, _scores, _read_all),
    "LLM-Streamline, similarities": Statistics({"method": "llm-streamline"}, _cosines, _read_all),
    **FEDSPINE,
}
"""Kinds of replies by name."""
