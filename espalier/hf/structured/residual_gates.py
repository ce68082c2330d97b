"""Gates on residual dimensions (SFT-P, section 3.1): costs, choice, and the pruned model.

Attention and feed-forward part of a block each read some residual dimensions and write some. A
dimension that is not read removes a column of the matrices that read, and one that is not written
removes a row of the matrix that writes. T(g) therefore counts weights of the blocks' matrices, also
with grouped queries.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from espalier.errors import InputError
from espalier.models.plan import BlockPlan, ModelPlan
from espalier.models.structure import COLUMNS, RESIDUAL_KINDS, ROWS, Structure, sizes_of
from pruning_kernels.groups.gates import within_budget

Scope = Literal["blocks", "model"]
"""Parameters to which a pruning ratio refers.

Either the blocks' matrices, or all parameters of the model, of which the others are not pruned.
"""
Gate = tuple[int, str]
"""Index of a block, and kind of gate: one of ``RESIDUAL_KINDS``."""
Gates = Mapping[Gate, Tensor]


@dataclass(frozen=True)
class ResidualGates:
    """Gates of a model: for each block, those of ``RESIDUAL_KINDS``."""

    plan: ModelPlan

    @cached_property
    def widths(self) -> dict[Gate, int]:
        """Number of residual dimensions of each gate, in order."""
        return {
            (block.index, kind): getattr(sizes_of(self.plan, block), kind)
            for block in self.plan.blocks
            for kind in RESIDUAL_KINDS
        }

    @cached_property
    def costs(self) -> dict[Gate, int]:
        """Number of weights per residual dimension of each gate."""
        return {
            (block.index, kind): residual_cost(block, kind)
            for block in self.plan.blocks
            for kind in RESIDUAL_KINDS
        }

    @property
    def total(self) -> int:
        """T of open gates: the number of weights of the blocks' matrices."""
        return sum(width * self.costs[gate] for gate, width in self.widths.items())

    def target(self, share: float, scope: Scope) -> int:
        """Return the number of weights of the blocks' matrices that may stay.

        Parameters
        ----------
        share : pruning ratio
        scope : parameters to which the ratio refers

        Raises
        ------
        InputError
            More weights must stay: the parameters outside the blocks' matrices, or one dimension of
            each gate.
        """
        # Parameters outside the blocks' matrices are not pruned.
        fixed = self.plan.num_parameters - self.total if scope == "model" else 0
        target = int((1 - share) * (self.total + fixed)) - fixed
        if target < (least := sum(self.costs.values())):
            raise InputError(
                f"pruning-ratio = {share:g} (pruning-ratio-of = '{scope}'): {max(target, 0)} weights of the blocks"
                f" may stay, and {least} must, one residual dimension of each kind in each block;"
                " lower it"
            )
        return target

    def spent(self, gates: Gates) -> Tensor:
        """Return T(g), the number of weights of the dimensions that are on.

        The result is a float32 scalar that carries the gradient of the gates.
        """
        sums = [gates[gate].float().sum() * float(cost) for gate, cost in self.costs.items()]
        return torch.stack(sums).sum()

    def chosen(self, logits: Gates, target: int | None) -> dict[Gate, Tensor]:
        """Choose gates deterministically.

        Parameters
        ----------
        logits : (dimensions,) for each gate
        target : number of weights that may stay; None opens the gates whose logit is not negative,
            and at least one per kind

        Returns
        -------
        dict
            (dimensions,), bool, for each gate
        """
        if target is None:
            found = {gate: logits[gate].detach().cpu() >= 0 for gate in self.widths}
            return {
                gate: own if own.any() else _highest(logits[gate]) for gate, own in found.items()
            }
        flat = torch.cat([logits[gate].detach().double().cpu() for gate in self.widths])
        sizes = torch.tensor(list(self.widths.values()))
        costs = torch.tensor([self.costs[gate] for gate in self.widths]).repeat_interleave(sizes)
        pools = torch.arange(len(sizes)).repeat_interleave(sizes)
        return dict(
            zip(
                self.widths,
                within_budget(flat, costs, pools, target).split(sizes.tolist()),
                strict=True,
            )
        )

    def structure(self, chosen: Gates, *, norm_of_read: bool = False) -> Structure:
        """Return the structure of the pruned model.

        Parameters
        ----------
        chosen : gates, see ``ResidualGates.chosen``
        norm_of_read : True if norms see only the dimensions that are read
        """
        kept = {
            block.index: {
                kind: chosen[block.index, kind].nonzero().squeeze(1).tolist()
                for kind in RESIDUAL_KINDS
            }
            for block in self.plan.blocks
        }
        return replace(Structure.whole(self.plan).keeping(kept), norm_of_read=norm_of_read)


def residual_cost(block: BlockPlan, kind: str) -> int:
    """Return the number of weights of a block's matrices per residual dimension of a kind.

    These are a row of the matrix that writes it, or a column of each matrix that reads it.
    """
    rows = (linear.shape[1] for linear in block.linears if ROWS[linear.name] == kind)
    columns = (linear.shape[0] for linear in block.linears if COLUMNS[linear.name] == kind)
    return sum(rows) + sum(columns)


def _highest(logits: Tensor) -> Tensor:
    return torch.arange(len(logits)) == int(logits.detach().cpu().argmax())
