"""A base model sliced along given bases, as an opened model: its tensors are made when they are read."""

from espalier.hf.opening.opened import OpenedModel
from espalier.hf.sliced.configuration import is_tied, require_sliceable, sliced_config
from espalier.hf.sliced.rotated_checkpoint import Bases, RotatedCheckpoint


class SlicedModel(OpenedModel):
    """What is left of a base when its residual stream is rotated and sliced (section 3).

    Parameters
    ----------
    base : the dense model
    bases : by place, see ``rotated_checkpoint``
    width : columns of each basis

    Raises
    ------
    Mistake
        The base's residual stream cannot be rotated.
    """

    def __init__(self, base: OpenedModel, bases: Bases, width: int) -> None:
        require_sliceable(base)
        super().__init__(base.directory)
        self.checkpoint = RotatedCheckpoint(base, bases, width, is_tied(base))
        self.config = sliced_config(self.config, self.family, self.plan, width)
        self.plan = self._make_plan()
