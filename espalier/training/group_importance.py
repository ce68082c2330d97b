"""Importance of prunable groups and LoRA modules, measured while a device trains (FedSpine).

Section 4.2 (equations 10 to 12) determines which groups the next cut removes. Section 4.3
(equations 9 and 13) describes the whole device to the server. Both use every step's gradients
before they are clipped. The importances of groups stay at the device.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from espalier.hf.nf4.matrices import row_reader
from espalier.hf.opening.opened_model import OpenedModel
from espalier.methods.tuning.fedspine import FedSpineSettings
from espalier.models.adapters import AdapterPlan, Tensors
from espalier.models.plan import block_key
from espalier.models.structure import GROUP_KINDS, READERS, group_size, kind_of, lines_of_groups
from espalier.training.adapted_model import AdaptedModel
from pruning_kernels.lora.factors import Factors
from pruning_kernels.lora.importance import (
    Gradients,
    RowReader,
    combined,
    group_importance,
    moving_average,
    taylor_term,
)


@dataclass
class GroupImportance:
    """Observer of one round's training of a device, active within ``watching``.

    With the score ``mask`` the input of each block's output matrices is kept until the backward
    pass, also if activations are recomputed.
    """

    model: OpenedModel
    """The device's model, already cut."""
    adapters: AdapterPlan
    adapted: Callable[[], AdaptedModel]
    """Function that returns the model in memory."""
    how: FedSpineSettings
    """Settings, of which ``score``, ``normalise`` and ``eta`` are used."""
    importance: Tensor | None = None
    """(groups,), float64: moving average of the importances; None before the first finite step.

    The order is by block: first attention groups, then FFN channels. Only groups that were not cut
    before are included.
    """
    terms: list[float] = field(default_factory=list)
    """Sum of ``(B gB)^2`` over all modules, for each step."""
    _of_masks: dict[tuple[int, str], Tensor] = field(default_factory=dict)
    """Gradients of the groups' masks in this step, by block and kind: (groups,), float64."""

    def __call__(self, step: int, gradients: Tensors) -> None:
        """Update the importances with a step's gradients, by blob key and canonical name.

        The model still has the parameters at which the gradients were computed.
        """
        # Cleared first, so that the next step starts with none even if this one is skipped below.
        masks = self._of_masks
        self._of_masks = {}
        parameters = self.adapted().parameters
        hf_model = self.adapted().whole
        scores: dict[tuple[int, str], list[Tensor]] = {}
        term = 0.0
        for index, adapter in self.adapters:
            block_parameters = parameters[block_key(index)]
            block_gradients = gradients.get(block_key(index), {})
            if adapter.name_b not in block_gradients or adapter.name_a not in block_gradients:
                # Without a gradient, or in a step that will be skipped, groups cannot be compared.
                return
            factors = Factors(
                block_parameters[adapter.name_b], block_parameters[adapter.name_a], adapter.scaling
            )
            factor_gradients = Gradients(
                block_gradients[adapter.name_b], block_gradients[adapter.name_a]
            )
            if self.how.score != "mask":
                name = adapter.linear.name
                kind, side = kind_of(name)
                linear = hf_model.get_submodule(
                    self.model.family.module_path(index, name)
                ).base_layer
                size = group_size(self.model.plan, name, kind)
                total = adapter.linear.shape[side] // size
                lines = lines_of_groups(self.model.plan, name, kind, total)
                # Reordered so that the rows of a group follow each other.
                order = torch.from_numpy(lines.ravel())
                values = group_importance(
                    _weight(linear), factors, factor_gradients, side, size, self.how.score, order
                )
                scores.setdefault((index, kind), []).append(values.cpu())
            term += taylor_term(factors.b, factor_gradients.b)
        if self.how.score == "mask":
            scores = {key: [gradient.square().cpu()] for key, gradient in masks.items()}
            if not all(bool(torch.isfinite(score).all()) for (score,) in scores.values()):
                # The product of output and gradient can overflow although all gradients are finite.
                return
        step_importance = torch.cat(
            [
                combined(scores[index, kind], self.how.normalise)
                for index in self._blocks
                for kind in GROUP_KINDS
            ]
        )
        self.importance = moving_average(self.importance, step_importance, self.how.eta)
        self.terms.append(term)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Record mask gradients within the block if the score is ``mask`` (APT's salience)."""
        hooks = []
        if self.how.score == "mask":
            self._of_masks.clear()
            for index, (kind, name) in product(self._blocks, READERS.items()):
                # The input of this matrix is the output of the block's heads or channels.
                module = self.adapted().whole.get_submodule(
                    self.model.family.module_path(index, name)
                )
                size = group_size(self.model.plan, name, kind)
                hooks.append(
                    module.register_forward_pre_hook(partial(self._watch, (index, kind), size))
                )
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _watch(self, key: tuple[int, str], size: int, _: Any, inputs: tuple[Tensor, ...]) -> None:
        """Register a hook that accumulates output times gradient of each group.

        Their sum is the gradient of a mask on the group.
        """
        features = inputs[0]
        # Below the lowest adapter no gradient flows back.
        if not features.requires_grad:
            return
        # A hook that refers to its own tensor would keep a step's activations alive.
        values = features.detach()

        def add(gradient: Tensor) -> None:
            # Summed over samples and tokens, then over the features of each group.
            products = (values * gradient).flatten(0, -2).sum(0, dtype=torch.float64)
            group_sums = products.view(-1, size).sum(1)
            self._of_masks[key] = (
                self._of_masks[key] + group_sums if key in self._of_masks else group_sums
            )

        features.register_hook(add)

    @property
    def _blocks(self) -> range:
        return range(len(self.model.plan.blocks))

    @property
    def taylor(self) -> float:
        """First term of equation 14: mean of ``terms`` over the steps; 0 without a step."""
        return sum(self.terms) / len(self.terms) if self.terms else 0.0


def _weight(linear: Any) -> Tensor | RowReader:
    """Return the frozen matrix, or a function that dequantises rows of a matrix in NF4."""
    state = getattr(linear.weight, "quant_state", None)
    return linear.weight if state is None else row_reader(linear.weight.data, state)
