"""Train what a method trains, on one party's sequences: AdamW on float32 parameters over a frozen model.

Covers: gradient accumulation that equals the larger batch, clipping, a learning-rate schedule over all rounds, FedProx, steps
that are left out because they are not finite, and repetition byte for byte on a CPU: what a step does depends on seed and
step, on the parameters and on the optimiser's state, on nothing else. A method may bring its own loss (``loss.py``), learning
rates (``groups.py``), a penalty, and an observer of gradients.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from espalier.corpora.tasks.batches import Batch
from espalier.pace.beats import beats
from espalier.settings.mistakes import Mistake
from espalier.settings.seeds import derive_seed
from espalier.settings.training import TrainingSettings
from espalier.training.groups import Group, grouped
from espalier.training.learning_rate import learning_rate
from espalier.training.loss import Loss, num_counted, summed_loss
from espalier.training.order import sequences_of_step

Parameters = Mapping[str, nn.Parameter]
"""What is trained, by a name of its own; float32."""
Moments = Mapping[str, Mapping[str, Tensor]]
"""AdamW's running means (``exp_avg``, ``exp_avg_sq``) and number of steps (``step``) of each parameter, by its name."""
Observer = Callable[[int, Mapping[str, Tensor]], None]
"""Of a step's number and its gradients: float32, shaped like the parameters, on their device, by name; of a step that will
be left out, none."""


@dataclass
class Trained:
    """What training did, beside changing the parameters."""

    losses: list[float] = field(default_factory=list)
    """Mean loss of each step's counted tokens, before the step and without a penalty, those that were left out among them."""
    weighed: list[int] = field(default_factory=list)
    """Steps in whose gradient their sequences had a part: neither left out, nor without any gradient."""
    skipped_steps: int = 0
    """Steps that were left out, because their loss or gradient was not finite: parameters and optimiser stayed as they were."""
    moments: Moments = field(default_factory=dict)
    """For a later call that is to go on."""


@dataclass
class Loop:
    """One party's training.

    Parameters
    ----------
    model : as of Hugging Face; called with ``input_ids`` and ``attention_mask``, returns ``logits``
    parameters : of the model, the ones that are trained
    settings : table ``[training]``
    num_sequences : how many sequences there are
    collate : makes a batch of some of them, by their numbers
    seed : of order and dropout
    total_steps : of the whole run, for the learning rate
    penalty : of the parameters, what is added to the loss of every step, whatever the number of its batches; one number
    loss : what is minimised, see ``loss.py`` for what it has to keep
    groups : parameters with a learning rate or weight decay of their own, see ``Group``
    observer : is shown every step's gradients of the mean loss, before the penalty's and FedProx's are added, before they are
        clipped and before the step is taken. The tensors are its own: it may keep them, and cannot change the step. A parameter
        that no loss led to has none. Of a step that will be left out, as its loss or gradient is not finite, none are shown.
        Nothing bounds a gradient here: whoever sends what an observer makes of them sees to it that no step, and no sequence,
        has most of it
    """

    model: Any
    parameters: Parameters
    settings: TrainingSettings
    num_sequences: int
    collate: Callable[[Sequence[int]], Batch]
    seed: int
    total_steps: int
    penalty: Callable[[], Tensor] | None = None
    loss: Loss = summed_loss
    groups: Sequence[Group] = ()
    observer: Observer | None = None

    def run(self, first_step: int, steps: int, moments: Moments | None = None) -> Trained:
        """Train ``steps`` steps from ``first_step`` on; the parameters' values at the start are FedProx's anchor.

        ``moments`` are what an earlier call returned; None begins anew.

        Raises
        ------
        Mistake
            No step was finite, or a group's learning rate or weight decay is beyond what ``[training]`` allows.
        """
        optimizer = self._optimizer(moments or {})
        anchor = (
            {name: value.detach().clone() for name, value in self.parameters.items()}
            if self.settings.proximal
            else {}
        )
        trained = Trained()
        with _training(self.model, self.settings.gradient_checkpointing):
            for step in beats(range(first_step, first_step + steps), "training step"):
                trained.losses.append(self._backward(step))
                learnt = self._has_gradient()
                self._show(step, trained.losses[-1])
                if self.penalty is not None:
                    self.penalty().backward()
                if self._finish(optimizer, anchor, step, trained.losses[-1]):
                    trained.skipped_steps += 1
                elif learnt:
                    trained.weighed.append(step)
        if trained.skipped_steps == steps:
            raise Mistake(
                f"training.learning-rate = {self.settings.learning_rate}: no step had a finite loss"
                " and gradient; lower it, or raise training.warmup-steps"
            )
        trained.moments = {
            name: dict(optimizer.state[value]) for name, value in self.parameters.items()
        }
        return trained

    def _optimizer(self, moments: Moments) -> torch.optim.AdamW:
        groups = [
            {
                "params": [self.parameters[name] for name in names],
                "weight_decay": chosen.weight_decay,
                "settings": chosen,
            }
            for names, chosen in grouped(self.parameters, self.groups, self.settings)
        ]
        optimizer = torch.optim.AdamW(groups, betas=(self.settings.beta1, self.settings.beta2))
        for name, kept in moments.items():
            parameter = self.parameters[name]
            here = {
                of: value if of == "step" else value.to(parameter.device)
                for of, value in kept.items()
            }
            # AdamW writes in them.
            optimizer.state[parameter] = {of: value.clone() for of, value in here.items()}
        return optimizer

    def _backward(self, step: int) -> float:
        """Add up a step's gradients: of the mean loss over its counted tokens, whatever their batch."""
        for parameter in self.parameters.values():
            parameter.grad = None
        chosen = self.settings
        numbers = sequences_of_step(
            self.num_sequences, chosen.batch_size * chosen.accumulation, step, self.seed
        )
        # What a step does must not depend on the order within it, and near texts have near lengths.
        numbers.sort()
        batches = [
            self.collate(numbers[i : i + chosen.batch_size])
            for i in range(0, len(numbers), chosen.batch_size)
        ]
        counted = sum(num_counted(batch) for batch in batches)
        total = 0.0
        device = next(iter(self.parameters.values())).device
        for place, batch in enumerate(batches):
            with _seeded(derive_seed(self.seed, "dropout", server_round=step, block=place), device):
                summed = self.loss(self.model, batch, device)
                if summed.dtype != torch.float32 or summed.ndim:
                    raise ValueError(
                        f"a loss is {summed.dtype}, {list(summed.shape)}, and must be"
                        " torch.float32, []"
                    )
                loss = summed / counted
            loss.backward()
            total += loss.item()
        return total

    def _has_gradient(self) -> bool:
        """Whether anything but zeros came out of a step, before the penalty and what pulls towards the anchor."""
        return any(
            value.grad is not None and bool(value.grad.any()) for value in self.parameters.values()
        )

    def _show(self, step: int, loss: float) -> None:
        """Let the observer have copies of the gradients; none of a step that will be left out."""
        if self.observer is None:
            return
        gradients = {
            name: value.grad.clone()
            for name, value in self.parameters.items()
            if value.grad is not None
        }
        norms = [gradient.norm() for gradient in gradients.values()]
        finite = math.isfinite(loss) and (
            not norms or bool(torch.isfinite(torch.stack(norms).norm()))
        )
        self.observer(step, gradients if finite else {})

    def _finish(
        self, optimizer: torch.optim.AdamW, anchor: Mapping[str, Tensor], step: int, loss: float
    ) -> bool:
        """Take the step; whether it was left out instead."""
        for name, value in anchor.items():
            parameter = self.parameters[name]
            # + mu (w - w_global), the gradient of mu / 2 ||w - w_global||^2 (FedProx, eq. 2)
            if parameter.grad is not None:
                parameter.grad.add_(parameter.detach() - value, alpha=self.settings.proximal)
        limit = self.settings.max_gradient_norm or float("inf")
        norm = nn.utils.clip_grad_norm_(list(self.parameters.values()), limit)
        if not (torch.isfinite(norm) and torch.isfinite(torch.tensor(loss))):
            return True
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(group["settings"], step, self.total_steps)
        optimizer.step()
        return False


@contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Let dropout draw from a seed, and leave the generators of the CPU and of all devices as they were."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        # torch.manual_seed would reach devices that nobody works on here.
        torch.default_generator.manual_seed(seed)
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield


@contextmanager
def _training(model: Any, checkpointing: bool) -> Iterator[None]:
    """Training mode, the base model's own dropout included, and, if asked, activations computed again in the backward pass.

    Keys and values are not kept beside what the backward pass needs: nothing is generated here.
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
    """Compute the blocks' activations again in the backward pass.

    transformers lets the embeddings' output ask for a gradient here, which only reentrant checkpointing needs. The backward
    pass would then go through the blocks below the lowest adapter too, and the hook would stay; so that is undone.
    """
    # The older name is deprecated since transformers 5.23, the newer one unknown before.
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": False})
    model.disable_input_require_grads()
