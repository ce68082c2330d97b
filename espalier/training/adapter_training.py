"""Train a run's adapters on one party's sequences, over the frozen base model."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

from torch import Tensor

from espalier.modeling.computing import Computing
from espalier.modeling.opened import OpenedModel
from espalier.settings.run import RunSettings
from espalier.training.adapted import AdaptedModel
from espalier.training.loop import Loop, Moments, Trained
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
    penalty: Callable[[Tensors], Tensor] | None = None
    """Of the adapters, what is added to the loss of every step."""

    @property
    def num_sequences(self) -> int:
        """How many sequences the party has."""
        return len(self.sequences)

    def rests_on(self, steps: Iterable[int], enough: int) -> int:
        """Tokens of the sequences to which some steps come, each sequence once; what is beyond ``enough`` is not counted."""
        batch = self.settings.training.batch_size * self.settings.training.accumulation
        seen, tokens = set[int](), 0
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
        steps: int = self.parties * self.settings.job.rounds * self.settings.training.steps
        return steps

    @cached_property
    def adapted(self) -> AdaptedModel:
        """The model that is trained."""
        return AdaptedModel.load(self.model, self.computing, self.settings, self.adapters, self.cache_folder)

    def run(
        self, start: Tensors, first_step: int, steps: int, moments: Moments | None = None
    ) -> tuple[dict[str, dict[str, Tensor]], Trained]:
        """Train from ``start``; the trained tensors, float32, and what training did.

        Raises
        ------
        Mistake
            No step was finite, or the model cannot be loaded.
        """
        adapted, chosen = self.adapted, self.settings.training
        adapted.set(start)
        flat = {f"{key}/{name}": value for key, block in adapted.parameters.items() for name, value in block.items()}
        loop = Loop(adapted.whole, flat, chosen, len(self.sequences), self.sequences.batch, self.seed, self.total_steps)
        if self.penalty is not None:
            loop.penalty = partial(self.penalty, adapted.parameters)
        trained = loop.run(first_step, steps, moments)
        return adapted.values(), trained
