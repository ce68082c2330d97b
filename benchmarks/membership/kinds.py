"""Kinds of tested replies, and their recomputation by a server from known samples."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.membership.attacks import Outcome, falls_of_loss, resemblances
from benchmarks.membership.clients import Clients
from espalier.hf.group_scores.flap import pack_moments, unpack_moments, watched_moments
from espalier.hf.machine.computing import Computing
from espalier.hf.opening.opened_model import OpenedModel
from espalier.hf.sliced.signals import mean_moments
from espalier.hf.stream.block_stream import BlockStream
from espalier.hf.stream.calibration import prune_by_block
from espalier.hf.stream.input_statistics import pack_statistics, watch_for
from espalier.messages.blobs.adapters import sums, unpack_adapters
from espalier.messages.blobs.mask_tensors import pack_masks, unpack_masks
from espalier.messages.tensor_blobs import unpack_tensors
from espalier.methods.pruning.fedprllm import FedPrLLMSettings
from espalier.methods.pruning.slicegpt import MOMENTS
from espalier.methods.tuning.adapters.tensors import trained
from espalier.settings.run import RunSettings, parse
from espalier.training.initial_values import initial_adapters
from pruning_kernels.groups.slicing import packed
from pruning_kernels.selection.local_pruning import LocalPruning

Recompute = Callable[[BlockStream, Tensor, RunSettings], Iterator[bytes]]
Read = Callable[[OpenedModel, int, bytes, int], Tensor]
Sent = Callable[[Clients, Sequence[int]], Iterator[list[bytes]]]


@dataclass(frozen=True)
class Statistics:
    """Kind of reply that is computed from calibration samples without training."""

    method: Mapping[str, Any]
    recompute: Recompute
    """Function that yields the blobs that a client makes of its samples."""
    read: Read
    """Function from (model, place, blob, tokens) to the numbers in the blob, (numbers,)."""
    sent: Sent | None = None
    """Function that yields the blobs of each asked client, if they are not those of round 1."""


def _masks(stream: BlockStream, samples: Tensor, run: RunSettings) -> Iterator[bytes]:
    job = run.of(FedPrLLMSettings)
    pruning = LocalPruning(job.metric, job.sparsity, job.local_group)
    for _, masks in prune_by_block(stream, samples, pruning.prune_mask, watch_for(pruning)):
        yield pack_masks(masks)


def _read_masks(model: OpenedModel, place: int, blob: bytes, _: int) -> Tensor:
    return torch.cat(
        [mask.flatten() for mask in unpack_masks(model.plan.blocks[place], blob).values()]
    )


def _moments(stream: BlockStream, samples: Tensor, _: RunSettings) -> Iterator[bytes]:
    return map(pack_moments, watched_moments(stream, samples))


def _read_moments(_: OpenedModel, __: int, blob: bytes, ___: int) -> Tensor:
    return torch.cat(
        [part for found in unpack_moments(blob).values() for part in (found.mean, found.variance)]
    )


def _signals(stream: BlockStream, samples: Tensor, _: RunSettings) -> Iterator[bytes]:
    for moments in mean_moments(stream, samples):
        yield pack_statistics({MOMENTS: packed(moments)})


def _read_signals(_: OpenedModel, __: int, blob: bytes, ___: int) -> Tensor:
    return torch.cat(
        [torch.from_numpy(value.copy()).flatten() for value in unpack_tensors(blob).values()]
    )


ADAPTERS = "FedPETuning, one round's adapters"
COMPARED = f"{ADAPTERS}, against the other clients'"
TUNING: dict[str, Any] = {
    "method": "fedpetuning",
    "training.steps": 10,
    "training.learning-rate": 5e-3,
}
"""Settings with the number of steps of the preset: 10 steps of 4 samples."""
STATISTICS = {
    "FedPrLLM, masks": Statistics({"method": "fedprllm"}, _masks, _read_masks),
    "FLAP, means and spreads": Statistics({"method": "flap"}, _moments, _read_moments),
    "SliceGPT, second moments": Statistics({"method": "slicegpt"}, _signals, _read_signals),
}


def recognised_by_adapters(
    clients: Clients, computing: Computing, method: Mapping[str, Any] = TUNING
) -> tuple[Outcome, Outcome]:
    """Look for one known sample of each client in its reply, among samples of all clients.

    Returns
    -------
    alone : outcome by the reply only
    compared : outcome after subtracting the mean effect of the other clients' replies, which the
        server has too
    """
    run = parse(clients.settings(method))
    model = clients.opened
    adapters = trained(model.plan, run)
    begun = initial_adapters(adapters, run.seed)
    shapes = adapters.shapes()
    found = []
    for body in clients.replies(method, {"rank_limit": run.lora.rank}):
        read = {
            key: unpack_adapters(shapes[key], body.blobs[key], run.federation.wire_dtype)
            for key in shapes
        }
        if run.federation.sends_differences:
            read = {key: sums(begun[key], read[key]) for key in shapes}
        found.append(read)
    known = torch.stack([clients.known(run, client)[0] for client in range(clients.number)])
    falls = falls_of_loss(BlockStream(model, computing), known, adapters, found)
    others = (falls.sum(dim=0, keepdim=True) - falls) / (len(falls) - 1)
    return Outcome.of(falls), Outcome.of(falls - others)


def recognised_by_statistics(
    clients: Clients, computing: Computing, kind: Statistics, known: Sequence[int]
) -> list[Outcome]:
    """Look for the client of some known samples by recomputing its reply from them.

    Parameters
    ----------
    clients : clients of the test
    computing : device, dtype and threads of the server
    kind : kind of reply
    known : numbers of samples that the server knows
    """
    run = parse(clients.settings(kind.method))
    model = clients.opened
    stream = BlockStream(model, computing)
    samples = [clients.known(run, client) for client in range(clients.number)]
    sent = [
        [body.blobs[key] for key in sorted(body.blobs)] for body in clients.replies(kind.method, {})
    ]
    outcomes = []
    for number in known:
        made = [list(kind.recompute(stream, own[:number], run)) for own in samples]
        read_sent = partial(_numbers, kind, model, sent, clients.samples * clients.tokens)
        read_made = partial(_numbers, kind, model, made, number * clients.tokens)
        outcomes.append(Outcome.of(resemblances(read_sent, read_made, len(sent[0]))))
    return outcomes


def _numbers(
    kind: Statistics, model: OpenedModel, blobs: Sequence[Sequence[bytes]], tokens: int, place: int
) -> Tensor:
    """Return the statistics of several parties at one place of the model: (parties, numbers)."""
    return torch.stack([kind.read(model, place, own[place], tokens) for own in blobs])
