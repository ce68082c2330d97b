"""Sliced model (SliceGPT): ``model/`` with the code that builds it, its size, and its losses."""

from espalier.hf.opening.opened import OpenedModel
from espalier.hf.sliced.export import export_sliced
from espalier.hf.sliced.rotated_checkpoint import SHORTCUTS
from espalier.hf.structured.export import Form
from server_app.artifacts.structured_model import SmallerResult, StructuredOutcome


class SlicedOutcome(StructuredOutcome):
    """Sliced model, compared with its base."""

    def _form(self, small: OpenedModel) -> Form:
        return "compact"

    def _export(self, small: OpenedModel, form: Form, card: str) -> None:
        export_sliced(small, self._target, card)

    def _federated(self, result: SmallerResult) -> OpenedModel:
        # The written model need not be rotated again when it is read.
        return OpenedModel(self._target)

    def _weights(self, small: OpenedModel) -> int:
        """Return the number of weights of the blocks, with those of the shortcuts."""
        shortcuts = sum(
            shape[0] * shape[1]
            for block in small.plan.blocks
            for name, shape in block.others
            if name.removesuffix(".weight") in SHORTCUTS
        )
        return super()._weights(small) + shortcuts
