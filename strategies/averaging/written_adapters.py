"""Adapters of a run as they are written for peft, if clients train others."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from espalier.hf.stream.edits import WeightEdit
from espalier.hf.whole.adapters import merged
from espalier.models.adapters import AdapterPlan
from espalier.models.plan import block_key
from strategies.fleet import RoundTime


class WrittenAdapters:
    """Plain adapters with the interface of ``AdapterResult`` that an outcome uses.

    Parameters
    ----------
    tensors : function of a blob key that returns the values of ``adapters``
    """

    def __init__(
        self,
        adapters: AdapterPlan,
        tensors: Callable[[str], dict[str, Tensor]],
        blobs: Mapping[str, str],
        rounds: list[RoundTime],
        report: Callable[[], dict[str, Any]],
    ) -> None:
        self.adapters = adapters
        self.tensors = tensors
        self.blobs = blobs
        self.rounds = rounds
        self.report = report

    def written(self) -> "WrittenAdapters":
        """Return these adapters."""
        return self

    def edits(self, index: int) -> Mapping[str, WeightEdit]:
        """Return the edits that merge the adapters into one block's dense weights."""
        blocks = [index] if index in self.adapters.blocks else []
        tensors = {block_key(number): self.tensors(block_key(number)) for number in blocks}
        return merged(self.adapters, tensors)(index)
