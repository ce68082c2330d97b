"""Residual dimensions in SFT-P (section 3.1): gates, costs and choice, and routing during training.

Attention and feed-forward part of a block each read some residual dimensions and write some. A
dimension that is not read removes a column of the matrices that read, and one that is not written
removes a row of the matrix that writes. T(g) therefore counts weights of the blocks' matrices, also
with grouped queries.

Hooks switch residual dimensions on and off, while the residual stream keeps its width. A gate
multiplies the output of a norm before attention or feed-forward part read it, and their output
before it is added to the residual stream. If all gates are 0 or 1, this equals the smaller dense
model of ``ResidualGates.structure``. Gates also get a gradient.

By default the norm sees all dimensions: the paper's equation 3 routes first, but its closest
published code normalises first, which keeps the pretrained scale. In the paper's order, a norm
divides by the root mean square of the dimensions that are on.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from espalier.errors import InputError
from espalier.hf.families import Family
from espalier.models.plan import ModelPlan
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
        costs = dict.fromkeys(self.widths, 0)
        for block in self.plan.blocks:
            for linear in block.linears:
                # A row of the matrix that writes a dimension, a column of each that reads it.
                for kind, weights in zip(
                    (ROWS[linear.name], COLUMNS[linear.name]), reversed(linear.shape), strict=True
                ):
                    if kind in RESIDUAL_KINDS:
                        costs[block.index, kind] += weights
        return costs

    @property
    def total(self) -> int:
        """T of open gates: the number of weights of the blocks' matrices."""
        return sum(width * self.costs[gate] for gate, width in self.widths.items())

    def target(self, ratio: float, scope: Scope) -> int:
        """Return the number of weights of the blocks' matrices that may stay.

        ``ratio`` is the pruning ratio, and ``scope`` the parameters to which it refers. Raises
        InputError if more weights must stay: the parameters outside the blocks' matrices, or one
        dimension of each gate.
        """
        # Parameters outside the blocks' matrices are not pruned.
        fixed = self.plan.num_parameters - self.total if scope == "model" else 0
        target = int((1 - ratio) * (self.total + fixed)) - fixed
        # At least one dimension of each gate must stay.
        if target < (minimum := sum(self.costs.values())):
            raise InputError(
                f"pruning.ratio = {ratio:g} (sft-p.ratio-of = '{scope}'): {max(target, 0)} weights"
                f" of the blocks may stay, and {minimum} must, one residual dimension of each kind"
                " in each block; lower it"
            )
        return target

    def spent(self, gates: Gates) -> Tensor:
        """Return T(g), the number of weights of the dimensions that are on: float32, ().

        It carries the gradient of the gates.
        """
        # float32, because a sum of many gates loses digits in half precision.
        sums = [gates[gate].float().sum() * float(cost) for gate, cost in self.costs.items()]
        return torch.stack(sums).sum()

    def chosen(self, logits: Gates, target: int | None) -> dict[Gate, Tensor]:
        """Choose gates deterministically: (dimensions,), bool, for each gate.

        Parameters
        ----------
        logits : (dimensions,) for each gate
        target : number of weights that may stay; None opens the gates whose logit is not negative,
            and at least one per kind
        """
        # Without a budget each gate decides for itself.
        if target is None:
            selected = {}
            for gate in self.widths:
                # Never empty: the most likely dimension stays.
                logit = logits[gate].detach().cpu()
                selected[gate] = (
                    logit >= 0 if (logit >= 0).any() else torch.arange(len(logit)) == logit.argmax()
                )
            return selected
        # All gates compete for one budget.
        flat = torch.cat([logits[gate].detach().double().cpu() for gate in self.widths])
        sizes = torch.tensor(list(self.widths.values()))
        costs = torch.tensor([self.costs[gate] for gate in self.widths]).repeat_interleave(sizes)
        # One pool per gate, of which at least one dimension stays.
        pools = torch.arange(len(sizes)).repeat_interleave(sizes)
        if flat.isnan().any():
            raise InputError("residual gates: a logit is NaN, so the training diverged")
        chosen = within_budget(flat, costs, pools, target).split(sizes.tolist())
        return dict(zip(self.widths, chosen, strict=True))

    def structure(self, chosen: Gates, *, norm_of_read: bool = False) -> Structure:
        """Return the structure of the pruned model with the chosen gates.

        With ``norm_of_read`` norms see only the dimensions that are read.
        """
        kept = {
            block.index: {
                kind: chosen[block.index, kind].nonzero().squeeze(1).tolist()
                for kind in RESIDUAL_KINDS
            }
            for block in self.plan.blocks
        }
        return replace(Structure.whole(self.plan).keeping(kept), norm_of_read=norm_of_read)


MODULES: Mapping[str, tuple[str, str]] = {
    "attn_reads": ("norms", "norm.attn"),
    "attn_writes": ("linears", "attn.o"),
    "mlp_reads": ("norms", "norm.mlp"),
    "mlp_writes": ("linears", "mlp.down"),
}
"""Module whose output a gate switches, by canonical name."""


Norm = Literal["all", "read"]
"""Dimensions that a norm sees: all of them, or only those that are read after it (equation 3)."""


class Routing:
    """Hooks in a whole model, with or without adapters; while ``gates`` is None they do nothing.

    A backward pass that recomputes activations needs the gates of its forward pass. Training code
    must therefore set ``gates`` and keep them until the backward pass has finished. Raises
    InputError if the blocks of the family have another structure.
    """

    def __init__(
        self, whole: nn.Module, family: Family, num_blocks: int, norm: Norm = "all"
    ) -> None:
        if not family.residual_prunable:
            raise InputError(
                f"models of the family {family.name} cannot be routed: a norm must stand before"
                " attention and feed-forward part, as in LLaMA"
            )
        self.gates: Gates | None = None
        self._hooks = []
        for index in range(num_blocks):
            for kind in RESIDUAL_KINDS:
                attribute, name = MODULES[kind]
                path = f"{family.blocks}.{index}.{getattr(family, attribute)[name]}"
                # A norm over what is read must be corrected, see ``_switch_norm``.
                hook = (
                    self._switch_norm if norm == "read" and attribute == "norms" else self._switch
                )
                self._hooks.append(
                    whole.get_submodule(path).register_forward_hook(partial(hook, (index, kind)))
                )

    def remove(self) -> None:
        """Remove the hooks from the model."""
        for hook in self._hooks:
            hook.remove()

    def _switch(self, gate: Gate, _: nn.Module, __: Any, output: Tensor) -> Tensor | None:
        # A forward hook that returns None leaves the output unchanged.
        return None if self.gates is None else output * self.gates[gate].to(output.dtype)

    def _switch_norm(self, gate: Gate, norm: Any, inputs: Any, output: Tensor) -> Tensor | None:
        if self.gates is None:
            return None
        gates = self.gates[gate]
        squares = inputs[0].float().square()
        # Gemma has another name for it.
        epsilon = float(norm.eps if hasattr(norm, "eps") else norm.variance_epsilon)
        # The norm has divided by the root mean square of all dimensions; correct its output.
        mean_square = (squares * gates).sum(-1, keepdim=True) / gates.sum().clamp_min(1.0)
        factor = ((squares.mean(-1, keepdim=True) + epsilon) / (mean_square + epsilon)).sqrt()
        return (output * gates * factor).to(output.dtype)

    @contextmanager
    def by(self, gates: Gates) -> Iterator[None]:
        """Route by gates, (dimensions,) each, on the model's device, within this context."""
        previous = self.gates
        self.gates = gates
        try:
            yield
        finally:
            self.gates = previous
