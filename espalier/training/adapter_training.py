"""Train a run's adapters, and what it trains whole beside them, on one party's sequences, over the frozen base model."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path

from torch import Tensor

from espalier.modeling.computing import Computing
from espalier.modeling.opened import OpenedModel
from espalier.settings.run import RunSettings
from espalier.training.adapted import AdaptedModel, Loader
from espalier.training.groups import Group
from espalier.training.loop import Loop, Moments, Trained
from espalier.training.loss import Loss, summed_loss
from espalier.training.order import sequences_of_step
from espalier.training.sequences import Sequences
from espalier.wire.adapters import AdapterPlan, Tensors


@dataclass
class AdapterTraining:
    """One party's training of the adapters."""

    model: OpenedModel
    computing: Computing
    settings: RunSettings
    adapters: AdapterPlan
    sequences: Sequences
    seed: int
    """Of order and dropout."""
    parties: int = 1
    """How many clients' steps this party takes."""
    cache_folder: Path | None = None
    """Where quantised weights are kept."""
    frozen: Tensors = field(default_factory=dict)
    """Of the adapters, those that are there and stay as they are."""
    penalty: Callable[[Tensors], Tensor] | None = None
    """Of the adapters, what is added to the loss of every step."""
    loss: Loss = summed_loss
    """What is minimised, see ``loss.py``."""
    groups: Sequence[Group] = ()
    """What has a learning rate or weight decay of its own, by ``flat_name``."""
    observer: Callable[[int, Tensors], None] | None = None
    """Is shown every step's gradients, see ``Loop``."""
    load: Loader = AdaptedModel.load
    """How the model comes into memory."""

    @property
    def num_sequences(self) -> int:
        """How many sequences the party has."""
        return len(self.sequences)

    def rests_on(self, steps: Iterable[int], enough: int) -> int:
        """Tokens of the sequences to which some steps come, each sequence once; what is beyond ``enough`` is not counted."""
        batch = self.settings.training.batch_size * self.settings.training.accumulation
        seen = set[int]()
        tokens = 0
        for step in steps:
            for number in sequences_of_step(len(self.sequences), batch, step, self.seed):
                if number not in seen:
                    seen.add(number)
                    tokens += int(self.sequences.batch([number]).attention_mask.sum())
                if tokens >= enough or len(seen) == len(self.sequences):
                    return tokens
        return tokens

    @property
    def total_steps(self) -> int:
        """Steps of the whole run."""
        steps: int = self.parties * self.settings.federation.rounds * self.settings.training.steps
        return steps

    @cached_property
    def adapted(self) -> AdaptedModel:
        """The model that is trained."""
        return self.load(
            self.model, self.computing, self.settings, self.adapters, self.cache_folder
        )

    def run(
        self, start: Tensors, first_step: int, steps: int, moments: Moments | None = None
    ) -> tuple[dict[str, dict[str, Tensor]], Trained]:
        """Train from ``start``, beside what is frozen; the trained tensors, float32, and what training did.

        Raises
        ------
        Mistake
            No step was finite, a group goes beyond ``[training]``, or the model cannot be loaded.
        """
        adapted = self.adapted
        chosen = self.settings.training
        adapted.set({**start, **self.frozen})
        trained_ones = {
            key: block for key, block in adapted.parameters.items() if key not in self.frozen
        }
        for value in (value for key in self.frozen for value in adapted.parameters[key].values()):
            # So that no backward pass goes below the lowest adapter that is trained.
            value.requires_grad_(False)
        flat = {
            flat_name(key, name): value
            for key, block in trained_ones.items()
            for name, value in block.items()
        }
        loop = Loop(
            adapted.whole,
            flat,
            chosen,
            len(self.sequences),
            self.sequences.batch,
            self.seed,
            self.total_steps,
        )
        loop.loss = self.loss
        loop.groups = self.groups
        if self.penalty is not None:
            loop.penalty = partial(self.penalty, trained_ones)
        if self.observer is not None:
            loop.observer = self._shown
        trained = loop.run(first_step, steps, moments)
        return {
            key: block for key, block in adapted.values().items() if key in trained_ones
        }, trained

    def _shown(self, step: int, gradients: Mapping[str, Tensor]) -> None:
        """Let the observer have the gradients by blob key and canonical name."""
        assert self.observer is not None
        names = {
            flat_name(key, name): (key, name)
            for key, block in self.adapted.parameters.items()
            for name in block
        }
        found: dict[str, dict[str, Tensor]] = {}
        for flat, gradient in gradients.items():
            key, name = names[flat]
            found.setdefault(key, {})[name] = gradient
        self.observer(step, found)


def flat_name(key: str, name: str) -> str:
    """A trained tensor's own name among all: of its blob's key and its canonical name."""
    return f"{key}/{name}"
