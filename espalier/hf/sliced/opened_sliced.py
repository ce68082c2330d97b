"""Opened base model that is sliced along given bases; tensors are derived when they are read."""

from espalier.hf.opening.opened import OpenedModel
from espalier.hf.sliced.configuration import is_tied, require_sliceable, sliced_config
from espalier.hf.sliced.rotated_checkpoint import Bases, RotatedCheckpoint


class SlicedModel(OpenedModel):
    """Base model with a rotated and sliced residual stream (SliceGPT section 3).

    Parameters
    ----------
    base : the dense model
    bases : function from the place of a basis to the basis; see ``rotated_checkpoint``
    width : number of columns of each basis

    Raises
    ------
    InputError
        The residual stream of the base cannot be rotated.
    """

    def __init__(self, base: OpenedModel, bases: Bases, width: int) -> None:
        require_sliceable(base)
        super().__init__(base.directory)
        self.checkpoint = RotatedCheckpoint(base, bases, width, is_tied(base))
        self.config = sliced_config(self.config, self.family, self.plan, width)
        self.plan = self._make_plan()
