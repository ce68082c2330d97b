"""Training by DP-SGD: clipped gradients of single records, summed, with Gaussian noise.

Source: Abadi et al. 2016, "Deep Learning with Differential Privacy", algorithm 1, with AdamW in
place of plain steps. A record or group (``data.group``) takes part in a step by Poisson sampling.
Opacus gives the gradient of each sequence. Those of a record or group are added, divided by its
number of counted tokens, and clipped to ``clip-norm`` as one vector over all trained tensors.

The noisy sum is divided by public numbers only. AdamW does not depend on this factor, so the number
of records, which is private, is not needed.

There is no dropout, neither of adapters nor of the base model: it is drawn for all sequences of a
forward pass together, so one more record would change what is dropped of the others, and the sum by
more than the clipping norm.

Noise is our own (``espalier/privacy/noise.py``): that of Opacus comes from torch's generator, and
its secure mode needs torchcsprng, which does not exist for current versions of torch.
"""

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from espalier.data.tasks.item import NOT_COUNTED, Batch
from espalier.environment.imports import importing
from espalier.errors import InputError
from espalier.privacy.noise import RandomBits
from espalier.progress import report_each
from espalier.settings.tables.training import BETAS, TrainingSettings
from espalier.training.loop import Parameters, in_training
from espalier.training.loss import Loss, summed_loss
from espalier.training.optimizer import learning_rate
from espalier.training.sequences import Sequences
from pruning_kernels.fixed_point import RECORD_BITS
from pruning_kernels.record_bound import clipped

Gradients = dict[str, Tensor]
"""Sum of clipped gradients by flat name, int64; 2^40 stands for the clipping norm."""


@dataclass
class PrivateSteps:
    """Training of one party by DP-SGD."""

    model: Any
    """Model of Hugging Face."""
    parameters: Parameters
    """Trained parameters of the model, float32, by unique names."""
    settings: TrainingSettings
    sequences: Sequences
    records: Sequence[Sequence[int]]
    """Numbers of the sequences of each record or group."""
    clip_norm: float
    noise_multiplier: float
    sampling_rate: float
    max_sequences: int
    """Maximum number of sequences of a record or group in a step, at most the batch size."""
    total_steps: int
    """Number of steps of the whole run, for the learning rate."""
    loss: Loss = summed_loss

    def run(self, first_step: int, steps: int, bits: RandomBits) -> None:
        """Train ``steps`` steps, starting with the number ``first_step``; no step is skipped."""
        optimizer = torch.optim.AdamW(
            [self.parameters[name] for name in sorted(self.parameters)],
            betas=BETAS,
            weight_decay=self.settings.weight_decay,
        )
        with self._gradients_of_sequences():
            for step in report_each(range(first_step, first_step + steps), "training step"):
                self._take(self.clipped_sum(self._chosen(bits)), bits)
                for group in optimizer.param_groups:
                    group["lr"] = learning_rate(self.settings, step, self.total_steps)
                optimizer.step()
        for parameter in self.parameters.values():
            parameter.grad = None

    def require_gradients_of_sequences(self) -> None:
        """Raise InputError if Opacus cannot separate the gradients of sequences in this model.

        The check uses two sequences of token 0, and no data.
        """
        tokens = torch.zeros(2, 3, dtype=torch.int64)
        is_classification = self.sequences.batch([0]).labels.ndim == 1
        labels = torch.zeros(2, dtype=torch.int64) if is_classification else tokens
        batch = Batch(tokens, torch.ones_like(tokens), labels)
        with self._gradients_of_sequences():
            self._backward(batch)

    def clipped_sum(self, chosen: Sequence[Sequence[int]]) -> Gradients:
        """Return the sum of the clipped gradients of some records.

        Parameters
        ----------
        chosen : numbers of the sequences of each record
        """
        # Fixed-point numbers, whose sum does not depend on the order of the records.
        total = {
            name: torch.zeros(value.shape, dtype=torch.int64, device=value.device)
            for name, value in self.parameters.items()
        }
        # A record passes alone. In a common pass its last bits would depend on the others, and with
        # adapters that a server chose for it, far more than that; its bound would not cover this.
        for record in chosen:
            batch = self.sequences.batch(record)
            # Divided by the counted tokens, so that a long record is not clipped more than a short
            # one.
            num_tokens = max(1.0, float(_counted(batch).sum()))
            parts = {
                name: rows.sum(dim=0, keepdim=True) / num_tokens
                for name, rows in self._backward(batch).items()
            }
            # The norm is over all tensors of a record together.
            for name, clipped_gradients in clipped(_on_one_device(parts), self.clip_norm).items():
                total[name] += clipped_gradients.sum(dim=0).to(total[name].device)
        return total

    def _chosen(self, bits: RandomBits) -> list[list[int]]:
        """Return the sequences of the records of a step."""
        return [
            bits.chosen(self.records[record], self.max_sequences)
            for record in bits.sampled(len(self.records), self.sampling_rate)
        ]

    def _backward(self, batch: Batch) -> Gradients:
        """Return the gradient of each sequence's summed loss, by name."""
        for parameter in self.parameters.values():
            parameter.grad = None
            parameter.grad_sample = None  # type: ignore[attr-defined]
        loss = self.loss(self.model, batch, next(iter(self.parameters.values())).device)
        with warnings.catch_warnings():
            # Token ids have no gradient, and torch says so at every backward hook.
            warnings.simplefilter("ignore", UserWarning)
            loss.backward()
        gradients = {}
        for name, parameter in self.parameters.items():
            rows = parameter.grad_sample  # type: ignore[attr-defined]
            if rows is None:
                rows = parameter.new_zeros(len(batch.input_ids), *parameter.shape)
            if not isinstance(rows, Tensor) or rows.shape[0] != len(batch.input_ids):
                raise InputError(
                    f"lora.targets: {name} sees tokens of several sequences at once, so gradients"
                    " of single records cannot be had; train other matrices, for instance"
                    " lora.targets = 'attn.q,attn.v', or set privacy.epsilon to 0"
                )
            gradients[name] = rows
            parameter.grad = None
            parameter.grad_sample = None  # type: ignore[attr-defined]
        return gradients

    def _take(self, total: Mapping[str, Tensor], bits: RandomBits) -> None:
        """Set the gradients of a step: the sum with noise, divided by public numbers."""
        unit = math.ldexp(max(1.0, self.noise_multiplier), RECORD_BITS)
        for name in sorted(self.parameters):
            parameter = self.parameters[name]
            noise = bits.grid_noise(parameter.numel(), self.noise_multiplier)
            noisy = total[name].cpu() + torch.from_numpy(noise).view(parameter.shape)
            parameter.grad = (noisy.double() / unit).to(parameter)

    @contextmanager
    def _gradients_of_sequences(self) -> Iterator[None]:
        """Let Opacus compute gradients of single sequences within the block, without dropout."""
        with importing():
            from opacus.grad_sample import GradSampleHooks

        # Models have buffers, such as positions, which are no parameters and have no gradient.
        hooks = GradSampleHooks(self.model, loss_reduction="sum", strict=False)
        try:
            with in_training(self.model, False):
                _turn_off_dropout(self.model)
                yield
        finally:
            hooks.remove_hooks()
            # Opacus leaves its attributes on the parameters.
            for parameter in self.parameters.values():
                for attribute in ("grad_sample", "_forward_counter", "_current_grad_sample"):
                    if hasattr(parameter, attribute):
                        delattr(parameter, attribute)


def _turn_off_dropout(model: Any) -> None:
    """Leave only the modules with trained parameters in training mode, which Opacus needs."""
    model.eval()
    for module in model.modules():
        # The module's own mode; ``train()`` would set those within it, too.
        module.training = any(
            parameter.requires_grad for parameter in module.parameters(recurse=False)
        )


def _counted(batch: Batch) -> Tensor:
    """Return the number of predictions of each sequence in the loss, float32."""
    if batch.labels.ndim == 1:
        return torch.ones(len(batch.labels))
    return (batch.labels[:, 1:] != NOT_COUNTED).sum(dim=1).float()


def _on_one_device(parts: Gradients) -> Gradients:
    """Return parts on the device of the first one, since a norm is over all of them."""
    device = next(iter(parts.values())).device
    return {name: part.to(device) for name, part in parts.items()}
