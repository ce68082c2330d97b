"""Routing of residual dimensions during training (SFT-P, section 3.1).

Hooks switch residual dimensions on and off, while the residual stream keeps its width. A gate
multiplies the output of a norm before attention or feed-forward part read it, and their output
before it is added to the residual stream. If all gates are 0 or 1, this equals the smaller dense
model of ``ResidualGates.structure``. Gates also get a gradient.

By default the norm sees all dimensions: the paper's equation 3 routes first, but its closest
published code normalises first, which keeps the pretrained scale. In the paper's order, a norm
divides by the root mean square of the dimensions that are on.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

from torch import Tensor, nn

from espalier.errors import InputError
from espalier.hf.families import Family
from espalier.hf.structured.residual_gates import Gate, Gates
from espalier.models.structure import RESIDUAL_KINDS

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
    """Hooks in a whole model; while ``gates`` is None they change nothing.

    A backward pass that recomputes activations needs the gates of its forward pass. Training code
    must therefore set ``gates`` and keep them until the backward pass has finished.

    Parameters
    ----------
    whole : Hugging Face model, with or without adapters
    family : model family with residual dimensions that can be removed
    num_blocks : number of blocks
    norm : dimensions that norms see

    Raises
    ------
    InputError
        The blocks of the family have another structure.
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
                where, name = MODULES[kind]
                path = f"{family.blocks}.{index}.{getattr(family, where)[name]}"
                hook = self._norm_hook if norm == "read" and where == "norms" else self._hook
                self._hooks.append(
                    whole.get_submodule(path).register_forward_hook(hook((index, kind)))
                )

    def remove(self) -> None:
        """Remove the hooks from the model."""
        for hook in self._hooks:
            hook.remove()

    def _hook(self, gate: Gate) -> Callable[..., Tensor | None]:
        def switch(_: nn.Module, __: Any, output: Tensor) -> Tensor | None:
            # A forward hook that returns None leaves the output unchanged.
            return None if self.gates is None else output * self.gates[gate].to(output.dtype)

        return switch

    def _norm_hook(self, gate: Gate) -> Callable[..., Tensor | None]:
        def switch(norm: Any, inputs: Any, output: Tensor) -> Tensor | None:
            if self.gates is None:
                return None
            own = self.gates[gate]
            squares = inputs[0].float().square()
            epsilon = float(norm.variance_epsilon)
            # The norm has divided by the root mean square of all dimensions; correct its output.
            seen = (squares * own).sum(-1, keepdim=True) / own.sum().clamp_min(1.0)
            factor = ((squares.mean(-1, keepdim=True) + epsilon) / (seen + epsilon)).sqrt()
            return (output * own * factor).to(output.dtype)

        return switch

    @contextmanager
    def by(self, gates: Gates) -> Iterator[None]:
        """Route by gates within this context.

        Parameters
        ----------
        gates : (dimensions,) for each gate, on the device of the model
        """
        before = self.gates
        self.gates = gates
        try:
            yield
        finally:
            self.gates = before
