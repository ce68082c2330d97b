"""Blob of a client's plain reply, of which summands are made."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from espalier.messages.sums.summands import Numbers
from espalier.messages.sums.summed_weights import WEIGHT, own_weight
from espalier.messages.tensor_blobs import views
from espalier.models.plan import BlockPlan, ModelPlan
from espalier.settings.run import RunSettings


@dataclass(frozen=True)
class PlainBlob:
    """Blob of a plain reply, with what its conversion depends on."""

    key: str
    """Key of the blob in ``SumSpecs``."""
    read: Callable[[], bytes]
    """Function that reads the blob; the blob of the weight (``is_weight``) has none."""
    report: Mapping[str, Any]
    """Fields of the plain report."""
    plan: ModelPlan
    """Plan of the clients' model."""
    run: RunSettings
    """Settings of the run."""

    @property
    def is_weight(self) -> bool:
        """True if this is the client's weight, which follows from its report."""
        return self.key == WEIGHT

    @property
    def weight(self) -> int:
        """Weight of the client in a mean: its samples, clipped, or 1 with equal weights."""
        return own_weight(self.report["samples"], self.run)

    @property
    def block(self) -> BlockPlan:
        """Block to which the blob belongs."""
        return self.plan.block(self.key)

    def tensors(self) -> Mapping[str, NDArray]:
        """Read the tensors by name."""
        return views(self.read())


ToSummands = Callable[[PlainBlob], Mapping[str, Numbers]]
"""Function that returns the summands of a blob by tensor name."""
