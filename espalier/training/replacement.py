"""Training of LLM-Streamline's replacement layer (Chen et al. 2025, section 2.3).

One layer learns to replace several consecutive blocks, on one party's samples. It receives the
hidden states before these blocks and is trained to return those after them, by mean squared error.
No other block is in memory during training.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from espalier.data.tasks.item import Batch
from espalier.hf.stream.block_stream import Activations, BlockStream, Call, samples_per_batch
from espalier.progress import report_each
from espalier.settings.tables.training import TrainingSettings
from espalier.training.loop import Loop, Trained
from espalier.training.sequences import numbered, sequences_of_steps


@dataclass
class Stretch:
    """Hidden states before and after consecutive blocks, for one party's samples."""

    stream: BlockStream
    samples: Tensor
    """(samples, tokens), int64."""
    start: int
    before: Activations
    behind: Activations

    @staticmethod
    @torch.no_grad()
    def walked(stream: BlockStream, samples: Tensor, start: int, span: int) -> "Stretch":
        """Pass samples through the model up to the end of the ``span`` blocks from ``start`` on."""
        activations = inputs = stream.start(samples)
        for index in report_each(range(start + span), "passing block"):
            if index == start:
                inputs = activations.copied()
            with stream.block(index, following=index + 1) as block:
                activations.through(index, block)
        return Stretch(stream, samples, start, inputs, activations)


@dataclass
class Replacement:
    """Training of the layer by one party."""

    stretch: Stretch
    """Hidden states that are learned."""
    settings: TrainingSettings
    """Training settings; ``batch_size`` counts samples."""
    seed: int
    """Seed of order and dropout."""
    total_steps: int
    """Number of steps of the whole run, for the learning rate."""
    _calls: dict[int, Call] = field(default_factory=dict)
    """Other arguments that the model passes to the block, in float32, by the number of samples."""

    def run(
        self, start: Mapping[str, Tensor], first_step: int, steps: int
    ) -> tuple[dict[str, Tensor], Trained]:
        """Train from ``start``; all tensors are float32 by canonical name.

        Returns the trained tensors and the result of the loop, and raises ``InputError`` if no step
        was finite.
        """
        stream = self.stretch.stream
        index = self.stretch.start
        prefix = f"{stream.model.family.blocks}.{index}."
        paths = {
            name: str(stream.model.family.parameter_path(name, index)).removeprefix(prefix)
            for name in start
        }
        with stream.block(index) as block:
            values = {
                paths[name]: value.to(stream.computing.device, torch.float32, copy=True)
                for name, value in start.items()
            }
            # The block's own values, in the file's type, are replaced by float32 copies.
            block.load_state_dict(values, strict=False, assign=True)
            parameters = {name: block.get_parameter(path) for name, path in paths.items()}
            for parameter in parameters.values():
                parameter.requires_grad_(True)
            loop = Loop(
                block,
                parameters,
                self._in_passes(),
                len(self.stretch.samples),
                numbered,
                self.seed,
                self.total_steps,
                loss=self._distance,
            )
            try:
                trained = loop.run(first_step, steps)
                return {
                    name: value.detach().to("cpu", copy=True) for name, value in parameters.items()
                }, trained
            finally:
                for value in parameters.values():
                    value.requires_grad_(False).grad = None

    def _in_passes(self) -> TrainingSettings:
        """Return settings with the same steps but smaller forward passes of equal size.

        A pass has at most as many samples as ``samples_per_batch`` allows.
        """
        batch = self.settings.batch_size
        max_size = samples_per_batch(self.stretch.samples.shape[1])
        pass_size = max(
            number for number in range(1, min(batch, max_size) + 1) if batch % number == 0
        )
        return self.settings.model_copy(
            update={"batch_size": pass_size, "accumulation": batch // pass_size}
        )

    def _distance(self, block: nn.Module, batch: Batch, device: torch.device) -> Tensor:
        """Return the mean squared error of each sample's hidden states, summed over samples."""
        args, kwargs = self._call(len(batch.labels))
        output = block(self._gathered(self.stretch.before, batch.labels), *args, **kwargs)
        states = output[0] if isinstance(output, tuple) else output
        target = self._gathered(self.stretch.behind, batch.labels)
        return (states - target).square().mean(dim=(1, 2)).sum()

    def _gathered(self, activations: Activations, numbers: Tensor) -> Tensor:
        """Return the hidden states of some samples: (samples, tokens, hidden size), float32."""
        return activations.of_samples(numbers.tolist()).to(
            self.stretch.stream.computing.device, torch.float32
        )

    def _call(self, samples: int) -> Call:
        """Return the block's other arguments for this number of samples, in float32."""
        # The arguments depend on the samples' shape only, so they are made once per size.
        if samples not in self._calls:
            # A party with fewer samples repeats them within a batch.
            numbers = torch.arange(samples) % len(self.stretch.samples)
            args, kwargs = self.stretch.stream.start(self.stretch.samples[numbers]).call(
                self.stretch.start
            )
            self._calls[samples] = (
                tuple(map(_in_float32, args)),
                {name: _in_float32(value) for name, value in kwargs.items()},
            )
        return self._calls[samples]

    def used(self, steps: Sequence[int]) -> list[int]:
        """Return the numbers of the samples that some steps use, each once."""
        batch = self.settings.batch_size * self.settings.accumulation
        return list(sequences_of_steps(len(self.stretch.samples), batch, steps, self.seed))


def _in_float32(value: object) -> object:
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.to(torch.float32)
    return tuple(map(_in_float32, value)) if isinstance(value, tuple) else value
