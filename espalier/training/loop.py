"""Training loop of all tuning methods: AdamW on float32 parameters over a frozen model.

Covers: gradient accumulation that equals the larger batch, gradient clipping, a learning-rate
schedule over all rounds, FedProx, and skipping of steps that are not finite. On a CPU training
repeats byte for byte: a step depends only on seed, step number, parameters and optimizer state. A
method can supply its own loss (``loss.py``), learning rates (``optimizer.py``), a penalty, and an
observer of gradients.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from espalier.data.tasks.item import Batch
from espalier.errors import InputError
from espalier.progress import report_each
from espalier.seeds import derive_seed
from espalier.settings.tables.training import BETAS, TrainingSettings
from espalier.training.loss import Loss, num_counted, summed_loss
from espalier.training.optimizer import Group, grouped, learning_rate
from espalier.training.sequences import sequences_of_step

Parameters = Mapping[str, nn.Parameter]
"""Trained parameters by unique names, float32."""
MAX_GRADIENT_NORM = 1.0
"""Norm to which the gradients of a step are clipped."""

Moments = Mapping[str, Mapping[str, Tensor]]
"""AdamW's moments (``exp_avg``, ``exp_avg_sq``) and step count (``step``) of each parameter."""
Observer = Callable[[int, Mapping[str, Tensor]], None]
"""Function of a step's number and its gradients by name.

The gradients are float32, shaped like the parameters and on their device. A step that will be
skipped has none.
"""


@dataclass
class Trained:
    """Result of training, in addition to the changed parameters."""

    losses: list[float] = field(default_factory=list)
    """Mean loss of each step's counted tokens, before the step and without penalty."""
    weighed: list[int] = field(default_factory=list)
    """Numbers of the steps that were not skipped and whose sequences contributed to a gradient."""
    skipped_steps: int = 0
    """Number of steps without effect, because their loss or gradient was not finite."""
    moments: Moments = field(default_factory=dict)
    """AdamW's moments, to continue in a later call."""


@dataclass(frozen=True)
class Loop:
    """Training of one party."""

    model: Any
    """Model of Hugging Face: from ``input_ids`` and ``attention_mask`` it computes ``logits``."""
    parameters: Parameters
    """Trained parameters of the model."""
    settings: TrainingSettings
    """Table ``[training]``."""
    num_sequences: int
    """Number of training sequences."""
    collate: Callable[[Sequence[int]], Batch]
    """Function that makes a batch of some sequences, by their numbers."""
    seed: int
    """Seed of order and dropout."""
    total_steps: int
    """Number of steps of the whole run, for the learning rate."""
    penalty: Callable[[], Tensor] | None = None
    """Function that returns a number, which is added to the loss once per step."""
    loss: Loss = summed_loss
    """Loss that is minimised, see ``loss.py`` for its contract."""
    groups: Sequence[Group] = ()
    """Parameters with their own learning rate or weight decay."""
    observer: Observer | None = None
    """Function that receives every step's gradients of the mean loss.

    They are copies, from before those of penalty and FedProx are added and before clipping. A
    parameter without a gradient is missing. Gradients are not bounded here: code that sends results
    of an observer must ensure that no step and no sequence dominates them.
    """
    betas: tuple[float, float] = BETAS
    """Betas of AdamW."""
    max_gradient_norm: float = MAX_GRADIENT_NORM
    """Norm to which a step's gradients are clipped."""

    def run(self, first_step: int, steps: int, moments: Moments | None = None) -> Trained:
        """Train ``steps`` steps, starting with the number ``first_step``.

        The initial values of the parameters are the anchor of FedProx. ``moments`` are those of an
        earlier call; without them AdamW starts with zeros. Raises InputError if no step was finite,
        or a group's learning rate or weight decay exceeds the bounds of ``[training]``.
        """
        optimizer = self._optimizer(moments or {})
        anchor = (
            {name: value.detach().clone() for name, value in self.parameters.items()}
            if self.settings.proximal
            else {}
        )
        trained = Trained()
        # Compiled code belongs to the model and is used again in later rounds of a process.
        model = torch.compile(self.model, dynamic=True) if self.settings.compile else self.model
        with in_training(self.model, self.settings.gradient_checkpointing):
            for step in report_each(range(first_step, first_step + steps), "training step"):
                trained.losses.append(self._backward(model, step))
                # A penalty and FedProx have gradients without any sequence, so it is asked before.
                has_gradient = any(
                    value.grad is not None and bool(value.grad.any())
                    for value in self.parameters.values()
                )
                self._show(step, trained.losses[-1])
                if self.penalty is not None:
                    self.penalty().backward()
                if self._finish(optimizer, anchor, step, trained.losses[-1]):
                    trained.skipped_steps += 1
                elif has_gradient:
                    trained.weighed.append(step)
        if trained.skipped_steps == steps:
            raise InputError(
                f"training.learning-rate = {self.settings.learning_rate}: no step had a finite loss"
                " and gradient; lower it"
            )
        trained.moments = {
            name: dict(optimizer.state[value]) for name, value in self.parameters.items()
        }
        return trained

    def _optimizer(self, moments: Moments) -> torch.optim.AdamW:
        groups = [
            {
                "params": [self.parameters[name] for name in names],
                "weight_decay": settings.weight_decay,
                "settings": settings,
            }
            for names, settings in grouped(self.parameters, self.groups, self.settings)
        ]
        optimizer = torch.optim.AdamW(groups, betas=self.betas)
        for name, kept in moments.items():
            parameter = self.parameters[name]
            # AdamW changes the moments in place, and the caller's must not change.
            optimizer.state[parameter] = {
                key: value.to("cpu" if key == "step" else parameter.device, copy=True)
                for key, value in kept.items()
            }
        return optimizer

    def _backward(self, model: Any, step: int) -> float:
        """Accumulate the gradients of the mean loss over a step's counted tokens, and return it.

        ``model`` is the model, compiled if the settings say so.
        """
        # The gradients of the step before.
        for parameter in self.parameters.values():
            parameter.grad = None
        settings = self.settings
        numbers = sequences_of_step(
            self.num_sequences, settings.batch_size * settings.accumulation, step, self.seed
        )
        # Within a step the order does not matter. Neighbours in the data often have similar
        # lengths, so sorting saves padding.
        numbers.sort()
        batches = [
            self.collate(numbers[i : i + settings.batch_size])
            for i in range(0, len(numbers), settings.batch_size)
        ]
        # Counted over all batches, so that accumulation gives the gradient of one large batch.
        num_tokens = sum(num_counted(batch) for batch in batches)
        total = 0.0
        devices = list(dict.fromkeys(value.device for value in self.parameters.values()))
        device = devices[0]
        for batch_index, batch in enumerate(batches):
            # Dropout depends only on seed, step and batch, so a repeated step draws the same.
            seed = derive_seed(self.seed, "dropout", server_round=step, block=batch_index)
            with seeded(seed, [entry for entry in devices if entry.type == "cuda"]):
                summed = self.loss(model, batch, device)
                if summed.dtype != torch.float32 or summed.ndim:
                    raise ValueError(
                        f"a loss is {summed.dtype}, {list(summed.shape)}, and must be"
                        " torch.float32, []"
                    )
                loss = summed / num_tokens
            loss.backward()
            total += loss.item()
        return total

    def _show(self, step: int, loss: float) -> None:
        """Give the observer copies of the gradients, or none if the step will be skipped."""
        if self.observer is None:
            return
        gradients = {
            name: value.grad.clone()
            for name, value in self.parameters.items()
            if value.grad is not None
        }
        # One norm shows whether any gradient is NaN or infinite.
        norm = nn.utils.get_total_norm(gradients.values())
        finite = math.isfinite(loss) and bool(torch.isfinite(norm))
        self.observer(step, gradients if finite else {})

    def _finish(
        self, optimizer: torch.optim.AdamW, anchor: Mapping[str, Tensor], step: int, loss: float
    ) -> bool:
        """Take the step; return True if it was skipped because it is not finite."""
        for name, value in anchor.items():
            parameter = self.parameters[name]
            # + mu (w - w_global), the gradient of mu / 2 ||w - w_global||^2 (FedProx, eq. 2)
            if parameter.grad is not None:
                parameter.grad.add_(parameter.detach() - value, alpha=self.settings.proximal)
        # Clips the sum, which includes the gradients of penalty and FedProx.
        norm = nn.utils.clip_grad_norm_(list(self.parameters.values()), self.max_gradient_norm)
        # Neither parameters nor moments change in a skipped step.
        if not (torch.isfinite(norm) and torch.isfinite(torch.tensor(loss))):
            return True
        # The schedule spans all rounds, so the rate follows from the step and not from this call.
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(group["settings"], step, self.total_steps)
        optimizer.step()
        return False


@contextmanager
def seeded(seed: int, devices: Sequence[torch.device]) -> Iterator[None]:
    """Seed dropout within the block, and then restore the generators of CPU and CUDA devices."""
    with torch.random.fork_rng(devices):
        # torch.manual_seed would also seed devices that are not used here.
        torch.default_generator.manual_seed(seed)
        for device in devices:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield


@contextmanager
def in_training(model: Any, checkpointing: bool) -> Iterator[None]:
    """Set training mode within the block, with the base model's own dropout.

    With ``checkpointing`` activations are recomputed in the backward pass. The cache of keys and
    values is turned off, because nothing is generated.
    """
    config: Any = getattr(model, "config", None)
    caching = getattr(config, "use_cache", None)
    if caching:
        config.use_cache = False
    model.train()
    if checkpointing:
        checkpoint_blocks(model)
    try:
        yield
    finally:
        if checkpointing:
            getattr(
                model, "activation_checkpointing_disable", model.gradient_checkpointing_disable
            )()
        model.eval()
        if caching:
            config.use_cache = caching


def checkpoint_blocks(model: Any) -> None:
    """Turn on gradient checkpointing of the blocks.

    transformers then makes the embeddings' output require a gradient, which only reentrant
    checkpointing needs. The backward pass would reach the blocks below the lowest adapter too, and
    the hook would stay. So this is undone.
    """
    # The older name is deprecated since transformers 5.23, which introduced the newer one.
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": False})
    model.disable_input_require_grads()
