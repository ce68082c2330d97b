"""Kinds of replies with whole layers of the model, whose hidden states the attacker compares."""

from collections.abc import Mapping
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from benchmarks.leakage.trained_replies import TrainedReplies
from benchmarks.membership.clients import Ask
from espalier.hf.group_scores.streamline import (
    first_layer,
    most_similar_stretch,
    open_streamlined,
    stretch_cosines,
)
from espalier.hf.stream.block_stream import Activations, BlockStream, run_through
from espalier.hf.stream.edits import replaced
from espalier.messages.blobs.adapters import read_layer
from espalier.messages.blobs.mask_tensors import unpack_kept
from espalier.messages.message import MessageBody
from espalier.methods.pruning.llm_streamline import LlmStreamlineSettings
from espalier.models.adapters import Tensors
from espalier.models.plan import block_key
from espalier.training.replacement import Stretch


def _errors(found: Activations, aim: Activations) -> Tensor:
    """Return the relative squared error of each sample's hidden states: (samples,), float64."""
    return torch.cat(
        [
            (one - other).double().square().sum(dim=(1, 2))
            / other.double().square().sum(dim=(1, 2))
            for one, other in zip(found.batches(), aim.batches(), strict=True)
        ]
    )


class KeptWeights(TrainedReplies):
    """FedSpaLLM's masks and kept weights of all layers.

    SparseGPT makes the outputs of the dense model on a client's own samples.
    """

    METHOD: ClassVar[Mapping[str, Any]] = {"method": "fedspallm"}
    _aim: tuple[Tensor, Activations] | None = None
    """Samples that were asked last, and their hidden states in the dense model."""

    def requests(self) -> list[Ask]:
        """Return the request to prune all layers of the dense model."""
        blocks = [block.index for block in self.clients.opened.plan.blocks]
        return [Ask("train", {"blocks": blocks, "versions": [0] * len(blocks)})]

    def read(self, body: MessageBody) -> Tensors:
        """Return the weights, of which the pruned ones are 0."""
        return {
            key: {
                name: matrix.weight().float() for name, matrix in unpack_kept(block, blob).items()
            }
            for block in self.clients.opened.plan.blocks
            for key, blob in [(block_key(block.index), body.blobs[block_key(block.index)])]
        }

    @torch.no_grad()
    def losses(self, samples: Tensor, tensors: Tensors) -> Tensor:
        """Return the relative squared error of the hidden states behind the last block."""
        stream = BlockStream(self.clients.opened, self.computing)
        if self._aim is None or not torch.equal(self._aim[0], samples):
            self._aim = samples, run_through(stream, samples)
        edits = replaced(lambda index: tensors[block_key(index)])
        return _errors(run_through(stream, samples, edits), self._aim[1])


class Layer(TrainedReplies):
    """LLM-Streamline's layer after the first round that trains it."""

    METHOD: ClassVar[Mapping[str, Any]] = {"method": "llm-streamline"}
    KEY: ClassVar[str] = "layer"
    _target: Stretch | None = None
    """Hidden states of the dense model around the layer, of the samples that were asked last."""

    @cached_property
    def span(self) -> int:
        """Number of blocks that the layer replaces."""
        return self.run.of(LlmStreamlineSettings).span(len(self.clients.opened.plan.blocks))

    @cached_property
    def start(self) -> int:
        """First block that the layer replaces, by the cosines of the first client."""
        samples: Tensor = self.clients.known(self.run, 0)
        after_norm = self.run.of(LlmStreamlineSettings).compares_after_norm
        stream = BlockStream(self.clients.opened, self.computing)
        return most_similar_stretch(
            stretch_cosines(stream, samples, self.span, after_norm=after_norm)
        )

    def requests(self) -> list[Ask]:
        """Return the request of the second round, which is the first that trains."""
        return [Ask("train", {"start": self.start}, server_round=2)]

    def read(self, body: MessageBody) -> Tensors:
        """Return the values of the layer."""
        first = first_layer(self.clients.opened, self.start)
        return {self.KEY: read_layer(body.blobs, first, self.run.federation)}

    @torch.no_grad()
    def losses(self, samples: Tensor, tensors: Tensors) -> Tensor:
        """Return the relative squared error of the hidden states behind the layer."""
        if self._target is None or not torch.equal(self._target.samples, samples):
            stream = BlockStream(self.clients.opened, self.computing)
            self._target = Stretch.walked(stream, samples, self.start, self.span)
        replaced = open_streamlined(self.clients.opened, self.start, self.span, tensors[self.KEY])
        stream = BlockStream(replaced, self.computing)
        states = self._target.before.copied()
        with stream.block(self.start) as layer:
            states.through(self.start, layer)
        return _errors(states, self._target.behind)
