"""Result of LLM-Streamline: the removed blocks, and the layer that replaces them.

The layer is stored tensor by tensor in the checkpoint's blobs.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from espalier.hf.group_scores.streamline import first_layer, open_streamlined
from espalier.hf.opening.opened import OpenedModel
from espalier.messages.blobs.adapters import differences, pack_adapters
from espalier.messages.blobs.replacement_layer import read_layer
from espalier.methods.llm_streamline import LlmStreamlineSettings
from espalier.settings.run import RunSettings
from espalier.storage.blobs import BlobStore

STATE = ("start", "cosines", "layer", "sent")
"""Attributes that a checkpoint stores."""


class StreamlinedResult:
    """Smaller model, available when its blocks are chosen.

    Parameters
    ----------
    settings : settings of the run
    model : base model
    store : store for the tensors, in a run that of the checkpoint
    """

    def __init__(self, settings: RunSettings, model: OpenedModel, store: BlobStore) -> None:
        self.settings = settings
        self.base = model
        self.store = store
        self.job = settings.of(LlmStreamlineSettings)
        self.span = self.job.span(len(model.plan.blocks))
        self.start = -1
        """Index of the first removed block; -1 before the choice."""
        self.cosines: list[float] = []
        """Cosine between input and output of each stretch of blocks, by its first block."""
        self.layer: dict[str, str] = {}
        """Hash of each float32 tensor of the layer, by canonical name; empty before training."""
        self.sent: dict[str, str] = {}
        """Hash of each of the layer's tensors as it is sent."""

    def state(self) -> dict[str, Any]:
        """Return numbers and hashes."""
        return {name: getattr(self, name) for name in STATE}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the state that ``state`` returned."""
        for name in STATE:
            setattr(self, name, state[name])

    def stored(self) -> list[str]:
        """Return the hashes of all blobs that the state names."""
        return [*self.layer.values(), *self.sent.values()]

    def tensors(self) -> dict[str, Tensor]:
        """Return the layer: float32, by canonical name.

        Before its first training it is the base model's block.
        """
        if not self.layer:
            return first_layer(self.base, self.start)
        return {name: load(self.store.get(blob))[name] for name, blob in self.layer.items()}

    def replace(self, folded: Iterable[tuple[str, Tensor]]) -> None:
        """Store a new layer, tensor by tensor, in full precision and as it is sent."""
        federation = self.settings.federation
        first = first_layer(self.base, self.start)
        layer: dict[str, str] = {}
        for name, value in folded:
            layer[name] = self.store.put(save({name: value}))
            sent = (
                differences({name: value}, first) if federation.sends_differences else {name: value}
            )
            self.sent[name] = self.store.put(pack_adapters(sent, federation.wire_dtype)[0])
        self.layer = layer

    def blob(self, name: str) -> bytes:
        """Return one tensor as it is sent."""
        return self.store.get(self.sent[name])

    def received(self) -> Mapping[str, Tensor]:
        """Return the layer with which clients begin a round: float32, by canonical name."""
        first = first_layer(self.base, self.start)
        return (
            read_layer(
                {name: self.blob(name) for name in self.sent}, first, self.settings.federation
            )
            if self.sent
            else first
        )

    @property
    def model(self) -> OpenedModel:
        """Smaller model."""
        layer = self.tensors() if self.job.replacement == "layer" else None
        return open_streamlined(self.base, self.start, self.span, layer)

    def report(self) -> dict[str, Any]:
        """Return size and remaining fraction of the model, the removed blocks, and all cosines."""
        small = self.model
        share = small.plan.num_parameters / self.base.plan.num_parameters
        trained = (
            sum(torch.Size(value.shape).numel() for value in self.tensors().values())
            if self.layer
            else 0
        )
        return {
            "parameters": small.plan.num_parameters,
            "share_of_the_base": share,
            "blocks_that_went": list(range(self.start, self.start + self.span)),
            "cosines": self.cosines,
            "trained_parameters": trained,
        }
