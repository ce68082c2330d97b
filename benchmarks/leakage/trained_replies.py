"""Kinds of replies with tensors that a client trained, and the model that such a reply makes."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from benchmarks.membership.clients import Ask, Clients
from benchmarks.membership.kinds import TUNING
from client_app.methods.tuning.sft_p import SmallerModel
from client_app.site import Site
from espalier.evaluation.perplexity import mean_losses
from espalier.hf.group_scores.similar_groups import evenly_dropped
from espalier.hf.machine.computing import Computing
from espalier.hf.opening.opened_model import OpenedModel, open_model
from espalier.hf.stream.block_stream import BlockStream
from espalier.hf.stream.edits import Edits
from espalier.hf.whole.adapters import merged
from espalier.hf.whole.inner_matrices import plain_tensors
from espalier.messages.blobs.adapters import sums, unpack_adapters
from espalier.messages.blobs.model_pieces import BYTES, PIECE, Piece
from espalier.messages.message import MessageBody, request_header
from espalier.messages.tensor_blobs import pack_tensors
from espalier.methods.tuning.adapters.tensors import of_round, trained
from espalier.methods.tuning.fedsoda import NEVER, FedSodaSettings
from espalier.methods.tuning.sft_p import SftPSettings
from espalier.methods.tuning.sft_p import trained as trained_masks
from espalier.models.adapters import AdapterPlan, Tensors
from espalier.settings.node import simulated_node
from espalier.settings.run import parse
from espalier.training.initial_values import initial_values
from espalier.training.masked_training import first_shared
from strategies.tuning.fedsoda.sub_model import manifest_of, write_sub_model


class TrainedReplies(ABC):
    """Replies of clients with trained tensors.

    Parameters
    ----------
    clients : clients that reply
    computing : device, dtype and threads of the attacker
    changes : settings that replace those of the kind
    """

    METHOD: ClassVar[Mapping[str, Any]] = TUNING

    def __init__(
        self, clients: Clients, computing: Computing, changes: Mapping[str, Any] | None = None
    ) -> None:
        self.clients = clients
        self.computing = computing
        self.method = {**self.METHOD, **(changes or {})}
        self.run = parse(clients.settings(self.method))

    def of(self, asked: Sequence[int]) -> list[Tensors]:
        """Return the tensors that some clients send: by blob key and canonical name."""
        return [
            self.read(replies[-1])
            for replies in self.clients.exchanges(self.method, self.requests(), asked)
        ]

    @abstractmethod
    def requests(self) -> list[Ask]:
        """Return the requests to a client, of which the last asks for the reply."""

    @abstractmethod
    def read(self, body: MessageBody) -> Tensors:
        """Return the values of the tensors in a reply, float32."""

    @abstractmethod
    def losses(self, samples: Tensor, tensors: Tensors) -> Tensor:
        """Return what training decreases, for each sample and these tensors: (samples,), float64.

        Parameters
        ----------
        samples : (samples, tokens), int64
        tensors : those of a reply, or a mean of several
        """


class Adapters(TrainedReplies):
    """FedPETuning's adapters of the first round, and those of methods that are like it."""

    @property
    def base(self) -> OpenedModel:
        """Model over which clients train."""
        return self.clients.opened

    @cached_property
    def plan(self) -> AdapterPlan:
        """Tensors that clients train."""
        return trained(self.base.plan, self.run)

    @cached_property
    def begun(self) -> Tensors:
        """Values with which training begins."""
        return initial_values(self.base, self.plan, self.run.seed)

    def requests(self) -> list[Ask]:
        """Return the request of the first round."""
        return [Ask("train", {"rank_limit": self.run.lora.rank})]

    def read(self, body: MessageBody) -> Tensors:
        """Return the values of the trained tensors, without those that stay frozen."""
        federation = self.run.federation
        sent = of_round(self.plan, self.run, 1).shapes()
        values = {
            key: unpack_adapters(shapes, body.blobs[key], federation.wire_dtype)
            for key, shapes in sent.items()
        }
        if not federation.sends_differences:
            return values
        return {key: sums(self.begun[key], block) for key, block in values.items()}

    def losses(self, samples: Tensor, tensors: Tensors) -> Tensor:
        """Return the next-token loss of each sample."""
        model, edits = self.model(tensors)
        texts = {str(number): sample[None] for number, sample in enumerate(samples)}
        found = mean_losses(BlockStream(model, self.computing), texts, edits)
        return torch.tensor(list(found.values()), dtype=torch.float64)

    def model(self, tensors: Tensors) -> tuple[OpenedModel, Edits]:
        """Return the base model with the adapters, whose frozen factors are those of the run."""
        whole = {key: {**block, **tensors[key]} for key, block in self.begun.items()}
        plain = {key: plain_tensors(self.plan, key, block) for key, block in whole.items()}
        return self.base, merged(self.plan, plain)


class OwnRank(Adapters):
    """HetLoRA's adapters of a client with the highest rank."""

    METHOD: ClassVar[Mapping[str, Any]] = {**TUNING, "method": "hetlora"}


class Stacked(Adapters):
    """FLoRA's adapters, which the server stacks."""

    METHOD: ClassVar[Mapping[str, Any]] = {**TUNING, "method": "flora"}


class OfDevices(Adapters):
    """FedSpine's adapters of the first round, in which nothing is removed yet."""

    METHOD: ClassVar[Mapping[str, Any]] = {**TUNING, "method": "fedspine"}


class InnerMatrices(Adapters):
    """Fed-SB's matrices between the frozen factors of LoRA."""

    METHOD: ClassVar[Mapping[str, Any]] = {**TUNING, "method": "fed-sb"}


class Generator(Adapters):
    """SFT-P's mask generator with LoRA.

    The attacker does not know a client's embedding, and takes its mean, which is zero. With it the
    generator chooses what the model loses.
    """

    METHOD: ClassVar[Mapping[str, Any]] = {**TUNING, "method": "sft-p"}

    @cached_property
    def plan(self) -> AdapterPlan:
        """Generator and LoRA."""
        return trained_masks(self.base.plan, self.run)

    @cached_property
    def begun(self) -> Tensors:
        """Values with which training begins."""
        return first_shared(self.base.plan, self.run)

    def model(self, tensors: Tensors) -> tuple[OpenedModel, Edits]:
        """Return the smaller model of a client whose embedding is zero."""
        site = Site(self.clients.settings(self.method), simulated_node())
        embedding = torch.zeros(self.run.of(SftPSettings).embedding)
        smaller = SmallerModel.of(site, request_header("sft-p", "train", 1), tensors, embedding)
        return smaller.model, smaller.edits


class LastBlocks(Adapters):
    """FedSODA's adapters of the last blocks, trained on a sub-model that is not aligned."""

    METHOD: ClassVar[Mapping[str, Any]] = {
        **TUNING,
        "method": "fedsoda",
        "fedsoda.adapter-layers": 2,
        "fedsoda.drop": "uniform",
        "fedsoda.group-layers": 1,
        "fedsoda.groups": 1,
        "fedsoda.emulator": "stored",
        "fedsoda.pre-align-steps": 0,
        "fedsoda.realign-every": 0,
    }

    @cached_property
    def base(self) -> OpenedModel:
        """Sub-model, written to the clients' folder."""
        whole = self.clients.opened
        job = self.run.of(FedSodaSettings)
        emulator = job.emulator_of(len(whole.plan.blocks))
        dropped = evenly_dropped(emulator, job.num_dropped, job.uniform_rounding)
        kept = [block.index for block in whole.plan.blocks if block.index not in dropped]
        folder = self.clients.folder / "sub-model"
        write_sub_model(whole, kept, folder, self.run)
        return open_model(str(folder))

    def requests(self) -> list[Ask]:
        """Return the offer of the sub-model, its pieces, and the request of the first round."""
        folder = self.base.directory
        manifest = manifest_of(folder, self.run.part_bytes)
        content = b"".join((folder / name).read_bytes() for name in manifest.names)
        pieces = []
        for index in range(len(manifest.piece_sha256)):
            size = manifest.piece_size(index)
            start = index * manifest.piece_bytes
            data = np.frombuffer(content[start : start + size], np.uint8)
            fields = Piece(model_sha256=manifest.sha256, index=index, size=size).model_dump()
            pieces.append(Ask("push", fields, blobs={PIECE: pack_tensors({BYTES: data})}))
        (train,) = super().requests()
        order = {**train.fields, "model_sha256": manifest.sha256, "aligned": NEVER}
        return [Ask("push", manifest.model_dump()), *pieces, Ask("train", order)]
