"""Costs of training a model's adapters at a client: parameters, bytes on the wire and memory.

Everything is computed from shapes. No weight is read or allocated.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn

from espalier.errors import EspalierError, InputError
from espalier.hf.families import Family, family_of
from espalier.hf.machine.model_memory import Footprint, footprint
from espalier.hf.opening.opened import skeleton_of
from espalier.hf.whole.model import Base
from espalier.messages.blobs.adapters import pack_adapters
from espalier.models.adapters import AdapterPlan, adapter_plan
from espalier.models.plan import BlockPlan, LinearPlan, ModelPlan
from espalier.settings.federation import Payload
from espalier.settings.lora import LoraSettings
from espalier.training.costs.activations import saved_bytes
from espalier.training.costs.shapes import configuration

FLOAT32 = 4
MOMENTS = 2
"""Number of values that AdamW stores per parameter."""


@dataclass(frozen=True)
class Account:
    """Costs of one client, computed from shapes."""

    model: str
    config: Mapping[str, Any]
    family: Family
    footprint: Footprint
    plan: ModelPlan
    adapters: AdapterPlan
    num_labels: int | None

    @property
    def frozen(self) -> int:
        """Number of the base model's frozen parameters, without an encoder's new head."""
        return self.footprint.parameters - self._trained_head

    @property
    def trained(self) -> int:
        """Number of trained parameters: adapters, and an encoder's classification head."""
        return self.adapters.num_parameters

    @property
    def share(self) -> float:
        """Fraction of all parameters that is trained; as in peft, the adapters count among all."""
        return self.trained / (self.frozen + self.trained)

    @property
    def _trained_head(self) -> int:
        return self.footprint.head if self.footprint.trained_head else 0

    def blob_bytes(self, payload: Payload) -> dict[str, int]:
        """Return the size of each blob with adapters by key, the same in both directions.

        Zeros are packed instead of values, because sizes depend only on names and shapes. In
        addition to its blobs, a message has a header and a report of less than 1 kB, and a hash of
        64 bytes per blob.
        """
        shapes = self.adapters.shapes()
        return {key: _packed_bytes(tuple(block.items()), payload) for key, block in shapes.items()}

    def frozen_bytes(
        self, base: Base, dtype: torch.dtype = torch.bfloat16, double_quantisation: bool = True
    ) -> int:
        """Return the bytes of the frozen weights in ``load_whole``.

        The arguments are those of ``Footprint.weight_bytes``.
        """
        return (
            self.footprint.weight_bytes(base, dtype, double_quantisation)
            - FLOAT32 * self._trained_head
        )

    @property
    def trained_bytes(self) -> int:
        """Bytes of the trained parameters in float32; their gradients need as many."""
        return FLOAT32 * self.trained

    @property
    def optimizer_bytes(self) -> int:
        """Bytes of AdamW's two moments in float32, without 4 bytes per tensor of step counts."""
        return MOMENTS * FLOAT32 * self.trained

    def activation_bytes(self, batch_size: int, tokens: int, dtype: torch.dtype) -> int:
        """Return the bytes of activations that are kept for the backward pass.

        See ``activations.saved_bytes``; ``dtype`` is that of the base.
        """
        skeleton = _skeleton(self.config, self.family, self.num_labels)
        return saved_bytes(
            skeleton, self.family, self.adapters, len(self.plan.blocks), dtype, batch_size, tokens
        )


def account(model: str, lora: LoraSettings, num_labels: int = 2) -> Account:
    """Compute the costs of training a model's adapters.

    Parameters
    ----------
    model : a known shape (``shapes.SHAPES``), or a directory with a ``config.json``
    lora : ranks, matrices and blocks
    num_labels : number of classes of an encoder's head; decoders have none

    Raises
    ------
    InputError
        The model is unknown or not supported, or has no such matrix, block or rank.
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
    except EspalierError as error:
        raise InputError(f"{model}: {error}") from None


def _skeleton(config: Mapping[str, Any], family: Family, num_labels: int | None) -> Any:
    from transformers import AutoConfig

    return skeleton_of(AutoConfig.for_model(**config), family, num_labels, "config.json")


def _plan(skeleton: nn.Module, family: Family) -> ModelPlan:
    def linear(index: int, name: str, path: str) -> LinearPlan:
        parameter = f"{family.blocks}.{index}.{path}.weight"
        rows, columns = skeleton.get_parameter(parameter).shape
        return LinearPlan(name, parameter, (rows, columns))

    # The submodule is a module list, which has a length.
    num_blocks = len(skeleton.get_submodule(family.blocks))  # type: ignore[arg-type]
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
    """Return the size of a blob; cached, because most blocks have the same shapes."""
    blob, _ = pack_adapters({name: torch.zeros(shape) for name, shape in shapes}, payload)
    return len(blob)
