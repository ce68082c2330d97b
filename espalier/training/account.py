"""What it costs a client to train a model's adapters: numbers, bytes on the wire, memory. No weight is read, none is made."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn

from espalier.modeling.families import Family, family_of
from espalier.modeling.memory import Footprint, footprint
from espalier.modeling.opened import skeleton_of
from espalier.modeling.whole import Base
from espalier.settings.federation import Payload
from espalier.settings.lora import LoraSettings
from espalier.settings.mistakes import Mistake
from espalier.training.activations import saved_bytes
from espalier.training.shapes import configuration
from espalier.wire.adapter_payload import pack_adapters
from espalier.wire.adapters import AdapterPlan, adapter_plan
from espalier.wire.plan import BlockPlan, LinearPlan, ModelPlan

FLOAT32 = 4
MOMENTS = 2
"""Numbers that AdamW keeps of each parameter."""


@dataclass(frozen=True)
class Account:
    """One client's costs, by counting."""

    model: str
    config: Mapping[str, Any]
    family: Family
    footprint: Footprint
    plan: ModelPlan
    adapters: AdapterPlan
    num_labels: int | None

    @property
    def frozen(self) -> int:
        """Parameters of the base model that stay as they are; an encoder's classification head is none of them."""
        return self.footprint.parameters - self._trained_head

    @property
    def trained(self) -> int:
        """Parameters that are trained: adapters, and of an encoder the classification head."""
        return self.adapters.num_parameters

    @property
    def share(self) -> float:
        """Trained parameters among all, as peft counts them: adapters are among all, too."""
        return self.trained / (self.frozen + self.trained)

    @property
    def _trained_head(self) -> int:
        return self.footprint.head if self.footprint.trained_head else 0

    def blob_bytes(self, payload: Payload) -> dict[str, int]:
        """Sizes of the blobs with all adapters, as they travel in either direction, by key.

        Zeros are packed in their place: sizes depend on names and shapes alone. A message has a header and a report beside
        its blobs, less than a kilobyte and a hash of 64 bytes for every blob.
        """
        shapes = self.adapters.shapes()
        return {key: _packed_bytes(tuple(block.items()), payload) for key, block in shapes.items()}

    def frozen_bytes(
        self, base: Base, dtype: torch.dtype = torch.bfloat16, double_quantisation: bool = True
    ) -> int:
        """Bytes of the frozen weights as ``load_whole`` holds them; arguments as those of ``Footprint.weight_bytes``."""
        return (
            self.footprint.weight_bytes(base, dtype, double_quantisation)
            - FLOAT32 * self._trained_head
        )

    @property
    def trained_bytes(self) -> int:
        """Bytes of the trained parameters, float32; their gradients have as many."""
        return FLOAT32 * self.trained

    @property
    def optimizer_bytes(self) -> int:
        """Bytes of AdamW's two moments, float32; its step counts, 4 bytes for each tensor, are left out."""
        return MOMENTS * FLOAT32 * self.trained

    def activation_bytes(self, batch_size: int, tokens: int, dtype: torch.dtype) -> int:
        """Bytes that are kept for the backward pass; see ``activations.saved_bytes``, to which ``dtype`` is the base's."""
        skeleton = _skeleton(self.config, self.family, self.num_labels)
        return saved_bytes(
            skeleton, self.family, self.adapters, len(self.plan.blocks), dtype, batch_size, tokens
        )


def account(model: str, lora: LoraSettings, num_labels: int = 2) -> Account:
    """Count what training a model's adapters costs.

    Parameters
    ----------
    model : a known shape (``shapes.SHAPES``), or a directory that has a ``config.json``
    lora : ranks, matrices and blocks
    num_labels : classes of an encoder's head; decoders have none

    Raises
    ------
    Mistake
        The model is not known or not supported, or has no such matrix, block or rank.
    """
    config = configuration(model)
    try:
        family = family_of(config, "config.json")
        labels = num_labels if family.kind == "encoder" else None
        counted = footprint(config, labels)
        skeleton = _skeleton(config, family, labels)
        plan = _plan(skeleton, family)
        return Account(
            model, config, family, counted, plan, adapter_plan(plan, lora, labels or 0), labels
        )
    except Mistake as mistake:
        raise Mistake(f"{model}: {mistake}") from None


def _skeleton(config: Mapping[str, Any], family: Family, num_labels: int | None) -> Any:
    from transformers import AutoConfig

    return skeleton_of(AutoConfig.for_model(**config), family, num_labels, "config.json")


def _plan(skeleton: nn.Module, family: Family) -> ModelPlan:
    def linear(index: int, name: str, path: str) -> LinearPlan:
        parameter = f"{family.blocks}.{index}.{path}.weight"
        rows, columns = skeleton.get_parameter(parameter).shape
        return LinearPlan(name, parameter, (rows, columns))

    num_blocks = len(skeleton.get_submodule(family.blocks))  # type: ignore[arg-type]  # a module list
    blocks = tuple(
        BlockPlan(index, tuple(linear(index, name, path) for name, path in family.linears.items()))
        for index in range(num_blocks)
    )
    features = blocks[0].linears[0].shape[1] if family.kind == "encoder" else 0
    return ModelPlan(
        blocks, sum(parameter.numel() for parameter in skeleton.parameters()), features
    )


@cache
def _packed_bytes(shapes: tuple[tuple[str, tuple[int, ...]], ...], payload: Payload) -> int:
    """Blocks are mostly alike, so few are really packed."""
    blob, _ = pack_adapters({name: torch.zeros(shape) for name, shape in shapes}, payload)
    return len(blob)
