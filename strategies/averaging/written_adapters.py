"""Adapters of a run as they are written for peft."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from espalier.hf.stream.edits import WeightEdit
from espalier.hf.whole.adapters import merged
from espalier.models.adapters import AdapterPlan
from espalier.models.plan import block_key
from strategies.fleet import RoundTime


@dataclass(frozen=True)
class WrittenAdapters:
    """Plain adapters of the base model, which are the result of a run."""

    adapters: AdapterPlan
    keys: Sequence[str]
    """Keys of all blobs."""
    tensors: Callable[[str], dict[str, Tensor]]
    """Function of a blob key that returns the values of ``adapters``."""
    rounds: Sequence[RoundTime]
    """Time of each round; empty without a virtual clock."""
    report: dict[str, Any]
    """Method's own entries of ``summary.json``."""

    def edits(self, index: int) -> Mapping[str, WeightEdit]:
        """Return the edits that merge the adapters into one block's dense weights."""
        blocks = [index] if index in self.adapters.blocks else []
        tensors = {block_key(number): self.tensors(block_key(number)) for number in blocks}
        return merged(self.adapters, tensors)(index)
