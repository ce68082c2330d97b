"""Routing while training (SFT-P, section 3.1): lanes of the residual stream are switched by hooks, and its width stays.

A gate multiplies what a norm gives, before attention or feed-forward part read it, and what they write, before it is added.
That is the smaller dense model of ``LaneGates.structure``, as long as gates are 0 or 1; and their gradients come with it. The
norm sees all lanes: the paper's equation 3 routes first, its closest published code normalises first, and so the pretrained
scale stays. The paper's order can be had: then a norm divides by the root mean square of the lanes that are on.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

from torch import Tensor, nn

from espalier.errors import Mistake
from espalier.hf.families import Family
from espalier.hf.structured.lane_gates import Gate, Gates
from espalier.models.structure import LANES

MODULES: Mapping[str, tuple[str, str]] = {
    "attn_reads": ("norms", "norm.attn"),
    "attn_writes": ("linears", "attn.o"),
    "mlp_reads": ("norms", "norm.mlp"),
    "mlp_writes": ("linears", "mlp.down"),
}
"""Whose output a gate switches, by canonical name."""


Norm = Literal["all", "read"]
"""Lanes that a norm sees: all of the residual stream, or those alone that are read behind it (equation 3)."""


class Routing:
    """Hooks in a whole model; without ``gates`` they change nothing.

    A backward pass that computes activations again needs the gates of its forward pass: whoever trains sets ``gates`` and
    leaves them until then.

    Parameters
    ----------
    whole : as of Hugging Face; adapters may be in it
    family : with lanes
    num_blocks : its blocks
    norm : which lanes norms see

    Raises
    ------
    Mistake
        The family's blocks are built otherwise.
    """

    def __init__(
        self, whole: nn.Module, family: Family, num_blocks: int, norm: Norm = "all"
    ) -> None:
        if not family.has_lanes:
            raise Mistake(
                f"models of the family {family.name} cannot be routed: a norm must stand before"
                " attention and feed-forward part, as in LLaMA"
            )
        self.gates: Gates | None = None
        self._hooks = []
        for index in range(num_blocks):
            for kind in LANES:
                where, name = MODULES[kind]
                path = f"{family.blocks}.{index}.{getattr(family, where)[name]}"
                hook = self._norm_hook if norm == "read" and where == "norms" else self._hook
                self._hooks.append(
                    whole.get_submodule(path).register_forward_hook(hook((index, kind)))
                )

    def remove(self) -> None:
        """Take the hooks out of the model."""
        for hook in self._hooks:
            hook.remove()

    def _hook(self, gate: Gate) -> Callable[..., Tensor | None]:
        def switch(_: nn.Module, __: Any, output: Tensor) -> Tensor | None:
            return None if self.gates is None else output * self.gates[gate].to(output.dtype)

        return switch

    def _norm_hook(self, gate: Gate) -> Callable[..., Tensor | None]:
        def switch(norm: Any, inputs: Any, output: Tensor) -> Tensor | None:
            if self.gates is None:
                return None
            own = self.gates[gate]
            squares = inputs[0].float().square()
            epsilon = float(norm.variance_epsilon)
            seen = (squares * own).sum(-1, keepdim=True) / own.sum().clamp_min(1.0)
            factor = ((squares.mean(-1, keepdim=True) + epsilon) / (seen + epsilon)).sqrt()
            return (output * own * factor).to(output.dtype)

        return switch

    @contextmanager
    def by(self, gates: Gates) -> Iterator[None]:
        """Route by gates, (lanes,) each, on the model's device, and then no more."""
        before = self.gates
        self.gates = gates
        try:
            yield
        finally:
            self.gates = before
