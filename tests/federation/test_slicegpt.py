"""SliceGPT in a small federation: the promises of every method, and its bases against those of pooled texts."""

from typing import Any, ClassVar

from promises import Promises

from espalier.wire.messages import Letter

WIDTH = 12


class TestSliceGpt(Promises):
    """One round; a residual stream of width 16 keeps 12."""

    method = "slicegpt"
    settings: ClassVar[dict[str, Any]] = {"slicegpt.slicing": 0.25, "slicegpt.multiple": 4}
    last_round = 1
    cuts_windows = "calibration_windows"

    def other_orders(self, order: Letter) -> list[Letter]:
        """There is nothing in an order that could be another."""
        return []
