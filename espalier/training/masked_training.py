"""Joint training of masks and adapters (SFT-P, equations 10 to 14).

The mask generator, a network that all clients share, maps a client's own embedding to the logits of
all gates. The gates route the residual stream of the frozen model. They are drawn once per step,
for all its batches, and the budget term uses the same draw as the model.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from espalier.data.tasks.item import Batch
from espalier.hf.structured.residual_gates import Gate, ResidualGates, Routing
from espalier.methods.tuning.sft_p import (
    BIAS,
    WEIGHT_DECAY,
    SftPSettings,
    lora_plan,
    shape_of,
    trained,
)
from espalier.models.adapters import Tensors
from espalier.models.mask_generator import (
    CODES,
    GENERATOR_KEY,
    NORM,
    NORM_BIAS,
    TRUNK,
    TRUNK_BIAS,
    GeneratorShape,
    head_name,
)
from espalier.models.plan import ModelPlan
from espalier.models.structure import RESIDUAL_KINDS
from espalier.seeds import derive_seed
from espalier.settings.run import RunSettings
from espalier.training.adapted_model import AdaptedModel, flattened
from espalier.training.adapter_training import AdapterTraining
from espalier.training.initial_values import initial_adapters
from espalier.training.loop import Loop, Moments, Trained
from espalier.training.loss import summed_loss
from espalier.training.optimizer import Group
from pruning_kernels.groups.gates import gumbel_gates, log_ratio, reinmax_gates

EMBEDDING = "embedding"
"""Name of the client's embedding among the trained parameters; it is in no blob."""


@dataclass
class MaskedTraining(AdapterTraining):
    """Training of the generator, the client's own embedding, and LoRA if the run has it.

    ``adapters`` has only the LoRA adapters. ``masked`` takes and returns LoRA and generator
    together.
    """

    embedding: Tensor = field(default_factory=lambda: torch.zeros(32))
    """(embedding,), float32: the initial embedding, replaced by the trained one."""
    target: int = 0
    """Budget: number of the blocks' weights that may be active."""
    budget: Tensor = field(default_factory=lambda: torch.zeros(0))
    """Budget as input of the generator, from ``budget_input``."""
    spent: list[float] = field(default_factory=list)
    """T(g) of every step's draw, divided by the target."""

    @cached_property
    def job(self) -> SftPSettings:
        """Settings of the method."""
        return self.settings.of(SftPSettings)

    @cached_property
    def shape(self) -> GeneratorShape:
        """Shape of the generator."""
        return shape_of(self.settings)

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
            parameters = {
                name: nn.Parameter(torch.zeros(size, device=self.computing.device))
                for name, size in tensors.items()
            }
            adapted.parameters.setdefault(key, {}).update(parameters)
        return adapted

    def masked(
        self, start: Tensors, first_step: int, steps: int, moments: Moments | None = None
    ) -> tuple[dict[str, dict[str, Tensor]], Trained]:
        """Train LoRA and generator from ``start``; return them and the result of the loop.

        ``embedding`` and ``spent`` change in place. Raises InputError if no step was finite, a
        group exceeds the bounds of ``[training]``, or the model cannot be loaded or routed.
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
        adapted.set(start)
        # A copy, because the optimizer changes the embedding in place.
        embedding = nn.Parameter(self.embedding.to(self.computing.device, torch.float32, copy=True))
        trained = flattened(adapted.parameters) if with_shared else {}
        if self.job.conditioned:
            trained[EMBEDDING] = embedding
        names_by_group = (
            (group, [name for name in group.names if name in trained]) for group in self.groups
        )
        draw = _Draw(self, embedding, first_step)
        routing = Routing(
            adapted.whole, self.model.family, len(self.model.plan.blocks), self.job.norm
        )

        def routed(model: Any, batch: Batch, device: torch.device) -> Tensor:
            routing.gates = draw.for_batch()
            return summed_loss(model, batch, device)

        loop = Loop(
            adapted.whole,
            trained,
            self.settings.training,
            len(self.sequences),
            self.sequences.batch,
            self.seed,
            self.total_steps if with_shared else steps,
            penalty=draw.penalty,
            loss=routed,
            groups=[replace(group, names=names) for group, names in names_by_group if names],
        )
        try:
            outcome = loop.run(first_step, steps, moments)
        finally:
            routing.remove()
        self.embedding = embedding.detach().to("cpu", copy=True)
        return outcome

    def fitted(self, shared: Tensors, steps: int) -> Trained:
        """Train only the embedding; generator and LoRA are frozen.

        ``embedding`` and ``spent`` change in place. Raises InputError if no step was finite, or the
        model cannot be loaded or routed.
        """
        with self.adapted.frozen(lambda *_: True):
            return self._run(shared, 0, steps, None, with_shared=False)

    def logits(self, tensors: Tensors, embedding: Tensor) -> dict[Gate, Tensor]:
        """Return the logits of all gates, with the constant added, on the CPU."""
        condition = torch.cat([embedding, self.budget])
        logits = gate_logits(self.model.plan, self.shape, tensors, condition)
        return {gate: logit + BIAS for gate, logit in logits.items()}


def of_generator(names: Collection[str], settings: RunSettings) -> Group:
    """Return the group of generator and embedding, with its own constant rate and weight decay."""
    # As a factor on the table's rate, whose bounds hold for this group too.
    rate = settings.of(SftPSettings).learning_rate / settings.training.learning_rate
    return Group(names, rate, WEIGHT_DECAY, "constant")


def first_shared(plan: ModelPlan, run: RunSettings) -> dict[str, dict[str, Tensor]]:
    """Return the initial generator and LoRA by blob key, which follow from the run's seed."""
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
        self._budget = training.budget.to(embedding.device)
        self._batches = 0
        self._step = first_step - 1
        self._uniform: dict[Gate, Tensor] = {}

    def for_batch(self) -> dict[Gate, Tensor]:
        """Return the gates for the next batch."""
        # The loop calls this once per batch, ``accumulation`` times per step.
        if self._batches % self._training.settings.training.accumulation == 0:
            self._step += 1
            seed = derive_seed(self._training.seed, "gates", server_round=self._step)
            generator = torch.Generator().manual_seed(seed)
            device = self._training.computing.device
            self._uniform = {
                # Away from 0 and 1, so that the logarithms of the noise are finite.
                gate: torch.rand(width, generator=generator).clamp(1e-6, 1 - 1e-6).to(device)
                for gate, width in self._training.gates.widths.items()
            }
        self._batches += 1
        return self._gates()

    def _gates(self) -> dict[Gate, Tensor]:
        training = self._training
        job = training.job
        condition = torch.cat([self._embedding, self._budget])
        logits = gate_logits(
            training.model.plan, training.shape, training.adapted.parameters, condition
        )
        gates = {}
        for gate, logit in logits.items():
            biased = logit + BIAS
            uniform = self._uniform[gate]
            if job.estimator == "reinmax":
                samples = (uniform < torch.sigmoid(biased)).to(biased.dtype)
                gates[gate] = reinmax_gates(biased, samples, job.tau)
            else:
                gates[gate] = gumbel_gates(biased, uniform, job.tau)
        return gates

    def penalty(self) -> Tensor:
        """Return the budget term lambda R(T(g), target) of the step (equations 13 and 14)."""
        training = self._training
        # From the numbers of the step's batches, so that the budget is that of the gates in use.
        spent = training.gates.spent(self._gates())
        training.spent.append(float(spent.detach()) / training.target)
        return training.job.strength * log_ratio(spent, training.target)


CODE_STD = 0.1
"""Standard deviation of initial codes; the paper does not give it.

Initial embeddings have the same by default, so that neither dominates the other.
"""
HEAD_STD = 0.02
"""Standard deviation of the heads' initial values.

It is small, so that at first the constant decides and nearly all residual dimensions are active.
"""


def first_generator(
    plan: ModelPlan, shape: GeneratorShape, seed: int
) -> dict[str, dict[str, Tensor]]:
    """Return the generator's initial values: float32, by blob key and canonical name.

    Every party computes the same values from the run's seed.
    """
    return {
        key: {
            name: _first(
                name, size, np.random.default_rng(derive_seed(seed, f"generator/{key}/{name}"))
            )
            for name, size in shapes.items()
        }
        for key, shapes in shape.shapes(plan).items()
    }


def _first(name: str, size: tuple[int, ...], generator: np.random.Generator) -> Tensor:
    if name == NORM:
        return torch.ones(size)
    if name in (NORM_BIAS, TRUNK_BIAS):
        return torch.zeros(size)
    if name == TRUNK:
        # The initialisation of torch.nn.Linear.
        bound = size[1] ** -0.5
        return torch.from_numpy(generator.uniform(-bound, bound, size).astype(np.float32))
    std = CODE_STD if name == CODES else HEAD_STD
    return torch.from_numpy(generator.normal(0.0, std, size).astype(np.float32))


def first_embedding(run: RunSettings, client: int | None) -> Tensor:
    """Return a client's initial embedding, (embedding,), float32.

    With ``client = None`` it is the constant that replaces embeddings if clients are not
    distinguished.
    """
    name = "embedding" if client is None else f"embedding/{client}"
    generator = np.random.default_rng(derive_seed(run.seed, name))
    job = run.of(SftPSettings)
    first = generator.normal(0.0, job.embedding_deviation, job.embedding)
    return torch.from_numpy(first.astype(np.float32))


def budget_input(job: SftPSettings, pruning_ratio: float) -> Tensor:
    """Return a client's budget as input of the generator: float32, (1,); (0,) without the setting.

    It is 0 for a client with the run's own pruning ratio. Inputs of one sign would not tell clients
    apart: AdamW's steps do not depend on the scale of a gradient, so that the weights of such an
    input move as the bias does, at every client.
    """
    if not job.budget_input:
        return torch.zeros(0)
    ratio = (1 - pruning_ratio) / (1 - job.pruning_ratio)
    return torch.tensor([job.budget_input * math.log(ratio)])


def gate_logits(
    plan: ModelPlan,
    shape: GeneratorShape,
    tensors: Tensors | Mapping[str, Mapping[str, nn.Parameter]],
    own: Tensor,
) -> dict[Gate, Tensor]:
    """Return the logits of all gates, without the constant that is added to them.

    Each is (dimensions,), float32 (equations 10 and 11). ``tensors`` are those of the generator, by
    blob key and canonical name, and ``own`` is the client's embedding followed by ``budget_input``,
    on their device.
    """
    generator = tensors[GENERATOR_KEY]
    codes = generator[CODES]
    # One row per gate: (gates, embedding + budget + code)
    inputs = torch.cat([own.expand(len(codes), -1), codes], dim=1)
    hidden = nn.functional.linear(inputs, generator[TRUNK], generator[TRUNK_BIAS])
    hidden = nn.functional.gelu(
        nn.functional.layer_norm(hidden, hidden.shape[1:], generator[NORM], generator[NORM_BIAS])
    )
    # The order of the codes' rows.
    gates = [(block.index, kind) for block in plan.blocks for kind in RESIDUAL_KINDS]
    return {
        (index, kind): tensors[shape.head_key(index)][head_name(kind)] @ features
        for (index, kind), features in zip(gates, hidden, strict=True)
    }
