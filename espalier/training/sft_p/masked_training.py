"""Joint training of masks and adapters (SFT-P, equations 12 to 14).

Gates from the mask generator route the residual stream of the frozen model. They are drawn once per
step, for all its batches, and the budget term uses the same draw as the model.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from espalier.data.tasks.item import Batch
from espalier.hf.structured.residual_gates import Gate, Norm, ResidualGates, Routing
from espalier.methods.sft_p import BIAS, WEIGHT_DECAY, SftPSettings, lora_plan, shape_of, trained
from espalier.models.adapters import Tensors
from espalier.models.mask_generator import GeneratorShape
from espalier.models.plan import ModelPlan
from espalier.seeds import derive_seed
from espalier.settings.run import RunSettings
from espalier.training.adapted_model import AdaptedModel
from espalier.training.adapter_training import AdapterTraining, flat_name
from espalier.training.initial_values import initial_adapters
from espalier.training.loop import Loop, Moments, Trained
from espalier.training.loss import summed_loss
from espalier.training.optimizer import Group
from espalier.training.sft_p.mask_generator import first_generator, gate_logits
from pruning_kernels.groups.gates import Estimator, gumbel_gates, log_ratio, reinmax_gates

EMBEDDING = "embedding"
"""Name of the client's embedding among the trained parameters; it is in no blob."""


@dataclass(frozen=True)
class Gating:
    """Settings of the gates and of the budget term."""

    estimator: Estimator = "reinmax"
    tau: float = 1.0
    strength: float = 16.0
    """Weight of the budget term (lambda)."""
    norm: Norm = "all"
    """Residual dimensions that norms see."""


@dataclass
class MaskedTraining(AdapterTraining):
    """Training of the generator, the client's own embedding, and LoRA if the run has it.

    ``adapters`` has only the LoRA adapters. ``masked`` takes and returns LoRA and generator
    together.
    """

    shape: GeneratorShape = field(default_factory=lambda: GeneratorShape(32, 32, 32, "per-gate"))
    gating: Gating = field(default_factory=Gating)
    embedding: Tensor = field(default_factory=lambda: torch.zeros(32))
    """(embedding,), float32: the initial embedding, replaced by the trained one."""
    conditioned: bool = True
    """True if the embedding is trained."""
    target: int = 0
    """Budget: number of the blocks' weights that may be active."""
    spent: list[float] = field(default_factory=list)
    """T(g) of every step's draw, divided by the target."""

    @cached_property
    def gates(self) -> ResidualGates:
        """Gates of the model."""
        return ResidualGates(self.model.plan)

    @cached_property
    def adapted(self) -> AdaptedModel:
        """Model with LoRA, and the generator's tensors among its parameters."""
        adapted = self.load(
            self.model, self.computing, self.settings, self.adapters, self.cache_folder
        )
        for key, tensors in self.shape.shapes(self.model.plan).items():
            own = {
                name: nn.Parameter(torch.zeros(size, device=self.computing.device))
                for name, size in tensors.items()
            }
            adapted.parameters.setdefault(key, {}).update(own)
        return adapted

    def masked(
        self, start: Tensors, first_step: int, steps: int, moments: Moments | None = None
    ) -> tuple[dict[str, dict[str, Tensor]], Trained]:
        """Train from ``start``; return the trained tensors and the result of the loop.

        Both sets of tensors have LoRA and generator. ``embedding`` and ``spent`` change in place.

        Raises
        ------
        InputError
            No step was finite, a group exceeds the bounds of ``[training]``, or the model cannot be
            loaded or routed.
        """
        outcome = self._run(start, first_step, steps, moments, with_shared=True)
        return self.adapted.values(), outcome

    def _run(
        self,
        start: Tensors,
        first_step: int,
        steps: int,
        moments: Moments | None,
        *,
        with_shared: bool,
    ) -> Trained:
        adapted = self.adapted
        chosen = self.settings.training
        adapted.set(start)
        embedding = nn.Parameter(self.embedding.to(self.computing.device, torch.float32, copy=True))
        flat = {
            flat_name(key, name): value
            for key, block in adapted.parameters.items()
            for name, value in block.items()
        }
        trained = (flat if with_shared else {}) | (
            {EMBEDDING: embedding} if self.conditioned else {}
        )
        total = self.total_steps if with_shared else steps
        loop = Loop(
            adapted.whole,
            trained,
            chosen,
            len(self.sequences),
            self.sequences.batch,
            self.seed,
            total,
        )
        of_groups = (
            (group, [name for name in group.names if name in trained]) for group in self.groups
        )
        loop.groups = [replace(group, names=names) for group, names in of_groups if names]
        draw = _Draw(self, embedding, first_step)
        routing = Routing(
            adapted.whole, self.model.family, len(self.model.plan.blocks), self.gating.norm
        )
        loop.penalty = draw.penalty

        def routed(model: Any, batch: Batch, device: torch.device) -> Tensor:
            routing.gates = draw.for_batch()
            return summed_loss(model, batch, device)

        loop.loss = routed
        try:
            outcome = loop.run(first_step, steps, moments)
        finally:
            routing.remove()
        self.embedding = embedding.detach().to("cpu", copy=True)
        return outcome

    def fitted(self, shared: Tensors, steps: int) -> Trained:
        """Train only the embedding; generator and LoRA are frozen.

        ``embedding`` and ``spent`` change in place.

        Raises
        ------
        InputError
            No step was finite, or the model cannot be loaded or routed.
        """
        frozen = [value for block in self.adapted.parameters.values() for value in block.values()]
        for value in frozen:
            value.requires_grad_(False)
        try:
            return self._run(shared, 0, steps, None, with_shared=False)
        finally:
            for value in frozen:
                value.requires_grad_(True)

    def logits(self, tensors: Tensors, embedding: Tensor) -> dict[Gate, Tensor]:
        """Return the logits of all gates, with the constant added, on the CPU."""
        found = gate_logits(self.model.plan, self.shape, tensors, embedding)
        return {gate: own + BIAS for gate, own in found.items()}


def of_generator(names: Collection[str], settings: RunSettings) -> Group:
    """Return the parameter group of generator and embedding.

    It has its own learning rate, which is constant, and weight decay.

    Parameters
    ----------
    names : names of the generator's and the embedding's parameters
    """
    rate = settings.of(SftPSettings).learning_rate / settings.training.learning_rate
    return Group(names, rate, WEIGHT_DECAY, "constant")


def first_shared(plan: ModelPlan, run: RunSettings) -> dict[str, dict[str, Tensor]]:
    """Return the initial generator and LoRA by blob key.

    Every party computes the same values from the run's seed.
    """
    values = first_generator(plan, shape_of(run), run.seed)
    for key, tensors in initial_adapters(lora_plan(plan, run), run.seed).items():
        values.setdefault(key, {}).update(tensors)
    return {key: values[key] for key in trained(plan, run).shapes()}


class _Draw:
    """Random gates of a step.

    The random numbers are drawn at the step's first batch. The other batches and the budget term
    recompute the gates from the same numbers, each with its own graph.
    """

    def __init__(self, training: MaskedTraining, embedding: nn.Parameter, first_step: int) -> None:
        self._training = training
        self._embedding = embedding
        self._batches = 0
        self._step = first_step - 1
        self._uniform: dict[Gate, Tensor] = {}

    def for_batch(self) -> dict[Gate, Tensor]:
        """Return the gates for the next batch."""
        if self._batches % self._training.settings.training.accumulation == 0:
            self._step += 1
            seed = derive_seed(self._training.seed, "gates", server_round=self._step)
            generator = torch.Generator().manual_seed(seed)
            device = self._training.computing.device
            self._uniform = {
                gate: torch.rand(width, generator=generator).clamp(1e-6, 1 - 1e-6).to(device)
                for gate, width in self._training.gates.widths.items()
            }
        self._batches += 1
        return self._gates()

    def _gates(self) -> dict[Gate, Tensor]:
        training = self._training
        gating = self._training.gating
        logits = gate_logits(
            training.model.plan, training.shape, training.adapted.parameters, self._embedding
        )
        make: Callable[[Tensor, Tensor], Tensor] = (
            _reinmax(gating.tau) if gating.estimator == "reinmax" else _gumbel(gating.tau)
        )
        return {gate: make(own + BIAS, self._uniform[gate]) for gate, own in logits.items()}

    def penalty(self) -> Tensor:
        """Return the budget term lambda R(T(g), target) of the step (equations 13 and 14)."""
        spent = self._training.gates.spent(self._gates())
        self._training.spent.append(float(spent.detach()) / self._training.target)
        return self._training.gating.strength * log_ratio(spent, self._training.target)


def _reinmax(tau: float) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda logits, uniform: reinmax_gates(
        logits, (uniform < torch.sigmoid(logits)).to(logits.dtype), tau
    )


def _gumbel(tau: float) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda logits, uniform: gumbel_gates(logits, uniform, tau)
