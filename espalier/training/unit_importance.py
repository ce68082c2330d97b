"""What a device learns of its model while it trains: what units are worth, and what its LoRA modules are (FedSpine).

Section 4.2 (equations 10 to 12) says which units the next cut takes; section 4.3 (equations 9 and 13) is told of the whole
device. Both look at every step's gradients before anything clips them. Importances stay with whoever made them.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from espalier.modeling.adapters import module_path
from espalier.modeling.opened import OpenedModel
from espalier.modeling.quantised import row_reader
from espalier.settings.fedspine import FedSpineSettings
from espalier.training.adapted import AdaptedModel
from espalier.wire.adapters import Adapter, AdapterPlan, Tensors
from espalier.wire.cuts import KINDS
from espalier.wire.payload import block_key
from espalier.wire.structure import COLUMNS, ROWS, unit_size
from pruning_kernels.factor_importance import taylor_term
from pruning_kernels.factors import Factors
from pruning_kernels.lora_importance import (
    Gradients,
    RowReader,
    combined,
    moving_average,
    unit_importance,
)

READERS = {"groups": "attn.o", "channels": "mlp.down"}
"""The matrix that reads what units of a kind give."""


def kind_of(linear: str) -> tuple[str, int]:
    """Kind of the units that lie in a matrix, and its side on which they do: 0 for rows, 1 for columns."""
    return (ROWS[linear], 0) if ROWS[linear] in KINDS else (COLUMNS[linear], 1)


@dataclass
class UnitImportance:
    """Watches one round's training of a device, within ``watching``.

    With the score ``mask`` what each attention and feed-forward part gives is kept until the backward pass, also where
    activations are computed again.

    Parameters
    ----------
    model : what the device trains, cut as it is
    adapters : of it
    adapted : gives the model in memory, once there is one
    how : the settings ``score``, ``normalise`` and ``eta``
    """

    model: OpenedModel
    adapters: AdapterPlan
    adapted: Callable[[], AdaptedModel]
    how: FedSpineSettings
    units: Tensor | None = None
    """(units,), float64, of the units that are left, of each block groups, then channels; None before any finite step."""
    terms: list[float] = field(default_factory=list)
    """Of each step the sum of ``(B gB)^2`` over all modules."""
    _of_masks: dict[tuple[int, str], Tensor] = field(default_factory=dict)
    """Of the step, by block and kind, gradients of masks on units: (units,), float64."""

    def __call__(self, step: int, gradients: Tensors) -> None:
        """See a step's gradients, by blob key and canonical name; the parameters are those that they are of."""
        # Whatever becomes of the step, the next one begins anew.
        masks = self._of_masks
        self._of_masks = {}
        parameters = self.adapted().parameters
        whole = self.adapted().whole
        found: dict[tuple[int, str], list[Tensor]] = {}
        by_mask = self.how.score == "mask"
        term = 0.0
        for index, adapter in self.adapters:
            own = parameters[block_key(index)]
            theirs = gradients.get(block_key(index), {})
            if adapter.name_b not in theirs or adapter.name_a not in theirs:
                # Nothing led to it in this step, or it is left out: units cannot be compared.
                return
            factors = Factors(own[adapter.name_b], own[adapter.name_a], adapter.scaling)
            learnt = Gradients(theirs[adapter.name_b], theirs[adapter.name_a])
            if not by_mask:
                kind, values = self._of_matrix(whole, index, adapter, factors, learnt)
                found.setdefault((index, kind), []).append(values)
            term += taylor_term(factors.b, learnt.b)
        if by_mask:
            found = {key: [gradient.square().cpu()] for key, gradient in masks.items()}
            if not all(bool(torch.isfinite(own).all()) for (own,) in found.values()):
                # What a unit gives times its gradient can overflow where no weight's gradient does.
                return
        seen = torch.cat(
            [
                combined(found[index, kind], self.how.normalise)
                for index in self._blocks
                for kind in KINDS
            ]
        )
        self.units = moving_average(self.units, seen, self.how.eta)
        self.terms.append(term)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """While a model trains: see what units give, where their masks are looked at (APT's salience)."""
        hooks = []
        if self.how.score == "mask":
            self._of_masks.clear()
            for index, (kind, name) in product(self._blocks, READERS.items()):
                module = self.adapted().whole.get_submodule(
                    module_path(self.model.family, index, name)
                )
                size = unit_size(self.model.plan, name, kind)
                hooks.append(
                    module.register_forward_pre_hook(partial(self._watch, (index, kind), size))
                )
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _watch(self, key: tuple[int, str], size: int, _: Any, inputs: tuple[Tensor, ...]) -> None:
        """Add up, in the backward pass, what a unit gives times its gradient: the gradient of a mask of one on the unit."""
        given = inputs[0]
        if not given.requires_grad:
            return
        # A hook that knew what it hangs on would keep a step's activations for good.
        values = given.detach()

        def add(gradient: Tensor) -> None:
            products = (values * gradient).flatten(0, -2).sum(0, dtype=torch.float64)
            own = products.view(-1, size).sum(1)
            self._of_masks[key] = self._of_masks[key] + own if key in self._of_masks else own

        given.register_hook(add)

    @property
    def _blocks(self) -> range:
        return range(len(self.model.plan.blocks))

    def _of_matrix(
        self, whole: Any, index: int, adapter: Adapter, factors: Factors, gradients: Gradients
    ) -> tuple[str, Tensor]:
        """What units are worth by one matrix, on the CPU."""
        name = adapter.linear.name
        plan = self.model.plan
        assert self.how.score != "mask"
        (kind, side), module = (
            kind_of(name),
            whole.get_submodule(module_path(self.model.family, index, name)),
        )
        size = unit_size(plan, name, kind)
        return (
            kind,
            unit_importance(
                _weight(module.base_layer), factors, gradients, side, size, self.how.score
            ).cpu(),
        )

    @property
    def taylor(self) -> float:
        """First term of equation 14: the mean over the steps; 0 without one."""
        return sum(self.terms) / len(self.terms) if self.terms else 0.0


def _weight(linear: Any) -> Tensor | RowReader:
    """The frozen matrix, or what reads rows of it where it is in NF4."""
    state = getattr(linear.weight, "quant_state", None)
    return linear.weight if state is None else row_reader(linear.weight.data, state)
