"""FedSpine's numbers in addition to its adapters: the bits of a device's first cut, and its losses.

The attacker trains as a device does, on a known sample, and looks at what the device would then cut
and report.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from benchmarks.membership.clients import Ask, Clients
from benchmarks.membership.kinds import TUNING, Statistics
from client_app.methods.tuning.fedspine import MEASURED, loss_of
from espalier.hf.opening.opened_model import OpenedModel
from espalier.hf.stream.block_stream import BlockStream
from espalier.hf.structured.selection import lowest
from espalier.messages.blobs.cut_bits import pack_bits, read_bits
from espalier.messages.message import MessageBody
from espalier.messages.tensor_blobs import pack_tensors, unpack_tensors
from espalier.methods.tuning.fedspine import STRUCTURE, CutOrder, FedSpineSettings, trained
from espalier.models.groups import Groups
from espalier.settings.run import RunSettings, parse
from espalier.training.adapter_training import AdapterTraining
from espalier.training.group_importance import GroupImportance
from espalier.training.initial_values import initial_values
from espalier.training.sequences import text_sequences

METHOD = {**TUNING, "method": "fedspine"}
PRUNED = 0.1
"""Pruning ratio that the server asks for in round 2, half of that of the run."""
LOSSES = "losses"
"""Name of the tensor with the losses before and after training."""


def _packed(before: float, after: float) -> bytes:
    return pack_tensors({LOSSES: np.array([before, after])})


def _round(stream: BlockStream, samples: Tensor, run: RunSettings) -> tuple[bytes, bytes]:
    """Return the bits and the losses of a device that trains one round on some samples."""
    model = stream.model
    job = run.of(FedSpineSettings)
    adapters = trained(model.plan, run)
    watch = GroupImportance(model, adapters, lambda: training.adapted, job)
    training = AdapterTraining(
        model, stream.computing, run, adapters, text_sequences(samples), run.seed, observer=watch
    )
    steps = run.training.steps
    start = initial_values(model, adapters, run.seed)
    numbers = list(training.used(range(steps)))[:MEASURED]
    before = loss_of(training, start, numbers)
    with watch.watching():
        tensors, _ = training.run(start, 0, steps)
    losses = _packed(before, loss_of(training, tensors, numbers))
    assert watch.importance is not None
    cut = lowest(Groups.of(model.plan), watch.importance, job, PRUNED)
    return pack_bits(cut), losses


def _bits(stream: BlockStream, samples: Tensor, run: RunSettings) -> Iterator[bytes]:
    yield _round(stream, samples, run)[0]


def _losses(stream: BlockStream, samples: Tensor, run: RunSettings) -> Iterator[bytes]:
    yield _round(stream, samples, run)[1]


def _sent(
    take: Callable[[list[MessageBody]], bytes], clients: Clients, asked: Sequence[int]
) -> Iterator[list[bytes]]:
    """Yield what devices send, of a round and the question what to cut in the next one."""
    structure = pack_bits(Groups.of(clients.opened.plan).none)
    rank = parse(clients.settings(METHOD)).lora.rank
    requests = [
        Ask("train", {"rank_limit": rank}),
        Ask("push", CutOrder(pruned=PRUNED).model_dump(), 2, {STRUCTURE: structure}),
    ]
    for replies in clients.exchanges(METHOD, requests, asked):
        yield [take(replies)]


def _read_bits(model: OpenedModel, _: int, blob: bytes, __: int) -> Tensor:
    return torch.from_numpy(read_bits(Groups.of(model.plan), blob))


def _read_losses(_: OpenedModel, __: int, blob: bytes, ___: int) -> Tensor:
    return torch.from_numpy(unpack_tensors(blob)[LOSSES].copy())


FEDSPINE = {
    "FedSpine, bits of a cut": Statistics(
        METHOD, _bits, _read_bits, partial(_sent, lambda replies: replies[1].blobs[STRUCTURE])
    ),
    "FedSpine, losses": Statistics(
        METHOD,
        _losses,
        _read_losses,
        partial(
            _sent,
            lambda replies: _packed(
                replies[0].fields["loss_before"], replies[0].fields["loss_after"]
            ),
        ),
    ),
}
"""Kinds of replies by name."""
