"""Gates on the lanes of the residual stream (SFT-P, section 3.1): what they cost, which are chosen, and the model that is left.

Attention and feed-forward part of a block each read some lanes and write some. A lane that is not read saves a column of the
matrices that read, one that is not written a row of the one that writes; so T(g) counts weights of the blocks' matrices, with
grouped queries as they are.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from espalier.errors import Mistake
from espalier.models.plan import BlockPlan, ModelPlan
from espalier.models.structure import COLUMNS, LANES, ROWS, Structure, units_of
from pruning_kernels.groups.gates import within_budget

Scope = Literal["blocks", "model"]
"""Of what a share is pruned: of the blocks' matrices, or of all parameters, of which the others stay whole."""
Gate = tuple[int, str]
"""Number of a block, and kind of lane."""
Gates = Mapping[Gate, Tensor]


@dataclass(frozen=True)
class LaneGates:
    """The gates of a model, for each block those of ``LANES``."""

    plan: ModelPlan

    @cached_property
    def widths(self) -> dict[Gate, int]:
        """Lanes of each gate, in order."""
        return {
            (block.index, kind): getattr(units_of(self.plan, block), kind)
            for block in self.plan.blocks
            for kind in LANES
        }

    @cached_property
    def costs(self) -> dict[Gate, int]:
        """Weights of one lane of each gate."""
        return {
            (block.index, kind): lane_cost(block, kind)
            for block in self.plan.blocks
            for kind in LANES
        }

    @property
    def total(self) -> int:
        """T of all gates: the weights of the blocks' matrices."""
        return sum(width * self.costs[gate] for gate, width in self.widths.items())

    def target(self, share: float, scope: Scope) -> int:
        """Weights that may stay where a share is pruned.

        Raises
        ------
        Mistake
            What has to stay is more than that: parameters beside the blocks' matrices, or one lane of each gate.
        """
        fixed = self.plan.num_parameters - self.total if scope == "model" else 0
        target = int((1 - share) * (self.total + fixed)) - fixed
        if target < (least := sum(self.costs.values())):
            raise Mistake(
                f"share = {share:g} (share-of = '{scope}'): {max(target, 0)} weights of the blocks"
                f" may stay, and {least} must, one lane of each kind in each block; lower it"
            )
        return target

    def spent(self, gates: Gates) -> Tensor:
        """T(g): weights of the lanes that are on; float32, (), with the gates' gradient."""
        sums = [gates[gate].float().sum() * float(cost) for gate, cost in self.costs.items()]
        return torch.stack(sums).sum()

    def chosen(self, logits: Gates, target: int | None) -> dict[Gate, Tensor]:
        """Gates without chance: within a budget, or with None those whose logit is not negative, and one of each at least.

        Parameters
        ----------
        logits : (lanes,) of each gate

        Returns
        -------
        (lanes,), bool, of each gate
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
        """The smaller model that these gates leave; ``norm_of_read``: its norms see the lanes that are read alone."""
        kept = {
            block.index: {
                kind: chosen[block.index, kind].nonzero().squeeze(1).tolist() for kind in LANES
            }
            for block in self.plan.blocks
        }
        return replace(Structure.whole(self.plan).keeping(kept), norm_of_read=norm_of_read)


def lane_cost(block: BlockPlan, kind: str) -> int:
    """Weights of a block's matrices that belong to one lane of a kind: a row of what writes it, a column of what reads it."""
    rows = (linear.shape[1] for linear in block.linears if ROWS[linear.name] == kind)
    columns = (linear.shape[0] for linear in block.linears if COLUMNS[linear.name] == kind)
    return sum(rows) + sum(columns)


def _highest(logits: Tensor) -> Tensor:
    return torch.arange(len(logits)) == int(logits.detach().cpu().argmax())
