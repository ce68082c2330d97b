"""LLM-Streamline (Chen et al. 2025, section 2.3): train one layer to do what a stretch of blocks does, on one party's windows.

The layer gets the hidden states that go into the stretch, and learns those that come out, by their mean squared distance. No
other block is in memory while it is trained.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from espalier.corpora.tasks.batches import Batch
from espalier.modeling.block_stream import Activations, BlockStream, Call, windows_per_batch
from espalier.pace.beats import beats
from espalier.settings.training import TrainingSettings
from espalier.training.loop import Loop, Trained
from espalier.training.numbered import numbered
from espalier.training.order import sequences_of_step


@dataclass
class Stretch:
    """What goes into a stretch of blocks and what comes out, of one party's windows."""

    stream: BlockStream
    windows: Tensor
    """(windows, tokens), int64."""
    start: int
    before: Activations
    behind: Activations

    @staticmethod
    @torch.no_grad()
    def walked(stream: BlockStream, windows: Tensor, start: int, span: int) -> "Stretch":
        """Pass windows through the model up to the end of a stretch."""
        activations = before = stream.start(windows)
        for index in beats(range(start + span), "passing block"):
            if index == start:
                before = activations.copied()
            with stream.block(index, following=index + 1) as block:
                activations.through(index, block)
        return Stretch(stream, windows, start, before, activations)


@dataclass
class Replacement:
    """One party's training of the layer.

    Parameters
    ----------
    stretch : what is learnt
    settings : in the words of ``[training]``; ``batch_size`` counts windows
    seed : of order and dropout
    total_steps : of the whole run, for the learning rate
    """

    stretch: Stretch
    settings: TrainingSettings
    seed: int
    total_steps: int
    _calls: dict[int, Call] = field(default_factory=dict)
    """What the model passes to the block beside the hidden states, by the number of windows."""

    def run(
        self, start: Mapping[str, Tensor], first_step: int, steps: int
    ) -> tuple[dict[str, Tensor], Trained]:
        """Train from ``start``, float32 by canonical name; the trained tensors likewise, and what training did.

        Raises
        ------
        Mistake
            No step was finite.
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
            block.load_state_dict(values, strict=False, assign=True)
            parameters = {name: block.get_parameter(path) for name, path in paths.items()}
            for parameter in parameters.values():
                parameter.requires_grad_(True)
            loop = Loop(
                block,
                parameters,
                self._in_passes(),
                len(self.stretch.windows),
                numbered,
                self.seed,
                self.total_steps,
            )
            loop.loss = self._distance
            try:
                trained = loop.run(first_step, steps)
                return {
                    name: value.detach().to("cpu", copy=True) for name, value in parameters.items()
                }, trained
            finally:
                for value in parameters.values():
                    value.requires_grad_(False).grad = None

    def _in_passes(self) -> TrainingSettings:
        """The same steps, in forward passes of equally many windows, no more than pass a block together elsewhere."""
        batch = self.settings.batch_size
        at_once = windows_per_batch(self.stretch.windows.shape[1])
        together = max(
            number for number in range(1, min(batch, at_once) + 1) if batch % number == 0
        )
        return self.settings.model_copy(
            update={"batch_size": together, "accumulation": batch // together}
        )

    def _distance(self, block: nn.Module, batch: Batch, device: torch.device) -> Tensor:
        """Mean squared distance of each window's hidden states from what is to come out, summed over the windows."""
        args, kwargs = self._call(len(batch.labels))
        output = block(self._gathered(self.stretch.before, batch.labels), *args, **kwargs)
        made = output[0] if isinstance(output, tuple) else output
        wanted = self._gathered(self.stretch.behind, batch.labels)
        return (made - wanted).square().mean(dim=(1, 2)).sum()

    def _gathered(self, activations: Activations, numbers: Tensor) -> Tensor:
        """Hidden states of some windows, float32: (windows, tokens, width)."""
        return activations.of_windows(numbers.tolist()).to(
            self.stretch.stream.computing.device, torch.float32
        )

    def _call(self, windows: int) -> Call:
        """What the model passes to the block beside so many windows, in float32."""
        if windows not in self._calls:
            args, kwargs = self.stretch.stream.start(self.stretch.windows[:windows]).call(
                self.stretch.start
            )
            self._calls[windows] = (
                tuple(map(_in_float32, args)),
                {name: _in_float32(value) for name, value in kwargs.items()},
            )
        return self._calls[windows]

    def rests_on(self, steps: Sequence[int]) -> int:
        """Tokens of the windows to which some steps come, each window once."""
        number = len(self.stretch.windows)
        batch = self.settings.batch_size * self.settings.accumulation
        seen = {
            window for step in steps for window in sequences_of_step(number, batch, step, self.seed)
        }
        return len(seen) * self.stretch.windows.shape[1]


def _in_float32(value: object) -> object:
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.to(torch.float32)
    return tuple(map(_in_float32, value)) if isinstance(value, tuple) else value
