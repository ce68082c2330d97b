"""Training of a run's adapters, and of tensors that are trained whole, by one party."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path

from torch import Tensor

from espalier.hf.machine.computing import Computing
from espalier.hf.opening.opened_model import OpenedModel
from espalier.hf.whole.folded_updates import folded_in
from espalier.hf.whole.inner_matrices import inner_matrices
from espalier.models.adapters import FACTORS, AdapterPlan, Tensors
from espalier.settings.run import RunSettings
from espalier.training.adapted_model import AdaptedModel, Loader, flattened
from espalier.training.loop import Loop, Moments, Trained
from espalier.training.loss import Loss, summed_loss
from espalier.training.optimizer import Group
from espalier.training.sequences import Sequences, sequences_of_steps


@dataclass
class AdapterTraining:
    """Training of the adapters over the frozen base model, on one party's sequences."""

    model: OpenedModel
    computing: Computing
    settings: RunSettings
    adapters: AdapterPlan
    sequences: Sequences
    seed: int
    """Seed of order and dropout."""
    parties: int = 1
    """Number of clients whose steps this party takes; more than 1 for a centralized baseline."""
    cache_folder: Path | None = None
    """Folder of quantised weights."""
    frozen: Tensors = field(default_factory=dict)
    """Adapters that are in the model but not trained."""
    penalty: Callable[[Tensors], Tensor] | None = None
    """Function of the adapters whose value is added to the loss of every step."""
    loss: Loss = summed_loss
    """Loss that is minimised, see ``loss.py``."""
    groups: Sequence[Group] = ()
    """Parameters with their own learning rate or weight decay, by ``flat_name``."""
    observer: Callable[[int, Tensors], None] | None = None
    """Function that receives every step's gradients, see ``Loop``."""
    load: Loader = AdaptedModel.load
    """Function that loads the model."""

    @property
    def num_sequences(self) -> int:
        """Number of the party's sequences."""
        return len(self.sequences)

    def used(self, steps: Iterable[int]) -> Iterator[int]:
        """Yield the numbers of the sequences that some steps use, each once."""
        batch = self.settings.training.batch_size * self.settings.training.accumulation
        return sequences_of_steps(len(self.sequences), batch, steps, self.seed)

    def rests_on(self, steps: Iterable[int], enough: int) -> int:
        """Return the number of tokens of the sequences that some steps use, each sequence once.

        Counting stops at ``enough`` tokens.
        """
        tokens = 0
        # Counting may need the texts, so it stops as soon as possible.
        for num_tokens in self.sequences.tokens(self.used(steps)):
            tokens += num_tokens
            if tokens >= enough:
                break
        return tokens

    @property
    def total_steps(self) -> int:
        """Number of steps of the whole run."""
        steps: int = self.parties * self.settings.federation.rounds * self.settings.training.steps
        return steps

    @cached_property
    def adapted(self) -> AdaptedModel:
        """Model that is trained."""
        # The same model serves rounds that train different factors.
        adapters = self.adapters.with_factors(FACTORS)
        return self.load(self.model, self.computing, self.settings, adapters, self.cache_folder)

    def run(
        self, start: Tensors, first_step: int, steps: int, moments: Moments | None = None
    ) -> tuple[dict[str, dict[str, Tensor]], Trained]:
        """Train from ``start``; return the tensors, float32, and the result of the loop.

        Frozen factors are among the tensors, unchanged. Raises InputError if no step was finite, a
        group exceeds the bounds of ``[training]``, or the model cannot be loaded.
        """
        adapted = self.adapted
        with inner_matrices(adapted.whole, adapted.parameters, self.model.family, self.adapters):
            return self._train(adapted, start, first_step, steps, moments)

    def _train(
        self,
        adapted: AdaptedModel,
        start: Tensors,
        first_step: int,
        steps: int,
        moments: Moments | None,
    ) -> tuple[dict[str, dict[str, Tensor]], Trained]:
        # Values of this round, and adapters that are only in the model.
        adapted.set({**start, **self.frozen})

        def is_frozen(key: str, name: str) -> bool:
            return key in self.frozen or not self.adapters.trains(name)

        # Only these are in the optimizer, and only these are returned.
        trained_parameters = adapted.chosen(lambda key, name: not is_frozen(key, name))
        loop = Loop(
            adapted.whole,
            flattened(trained_parameters),
            self.settings.training,
            len(self.sequences),
            self.sequences.batch,
            self.seed,
            self.total_steps,
            penalty=partial(self.penalty, trained_parameters) if self.penalty else None,
            loss=self.loss,
            groups=self.groups,
            observer=self._shown if self.observer else None,
        )
        # Updates of earlier rounds are part of the base while training.
        folded = folded_in(adapted.whole, self.model.family, self.adapters, start)
        with adapted.frozen(is_frozen), folded:
            trained = loop.run(first_step, steps, moments)
        return {
            key: block for key, block in adapted.values().items() if key in trained_parameters
        }, trained

    def _shown(self, step: int, gradients: Mapping[str, Tensor]) -> None:
        """Give the observer the gradients by blob key and canonical name."""
        assert self.observer is not None
        by_key: dict[str, dict[str, Tensor]] = {}
        for flat, gradient in gradients.items():
            # ``flat_name`` joins key and name by the first slash.
            key, _, name = flat.partition("/")
            by_key.setdefault(key, {})[name] = gradient
        self.observer(step, by_key)
