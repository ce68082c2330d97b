"""The bases along which a residual stream is sliced, place by place, in the checkpoint's blobs."""

from typing import Any

from torch import Tensor

from espalier.modeling.opened import OpenedModel
from espalier.modeling.sliced.opened_sliced import SlicedModel
from espalier.modeling.sliced.signals import basis_of, pack_basis, read_basis
from espalier.storage.blobs import BlobStore
from espalier.wire.slicegpt import dense_width

STATE = ("bases", "kept")
"""Attributes that a checkpoint keeps."""


class SlicedResult:
    """A sliced model, once its bases are found.

    Parameters
    ----------
    model : the base
    store : where bases are kept, for a run the checkpoint's
    width : of the residual stream that is left
    """

    def __init__(self, model: OpenedModel, store: BlobStore, width: int) -> None:
        self.base = model
        self.store = store
        self.width = width
        self.bases: list[str] = []
        """Hash of each place's blob."""
        self.kept: list[float] = []
        """Which share of the signals' squared length lies in each basis."""

    def state(self) -> dict[str, Any]:
        """Hashes and shares."""
        return {name: getattr(self, name) for name in STATE}

    def restore(self, state: dict[str, Any]) -> None:
        """Take over what ``state`` returned."""
        for name in STATE:
            setattr(self, name, state[name])

    def stored(self) -> list[str]:
        """Hashes of all blobs that the state names."""
        return self.bases

    def take(self, moments: Tensor) -> float:
        """Find the basis of the next place from its second moments; which share of them lies in it."""
        basis, kept = basis_of(moments, self.width)
        self.bases.append(self.store.put(pack_basis(basis)))
        self.kept.append(kept)
        return kept

    def blob(self, place: int) -> bytes:
        """A basis as it travels."""
        return self.store.get(self.bases[place])

    @property
    def model(self) -> SlicedModel:
        """The sliced model, whose tensors are made when they are read."""
        return SlicedModel(self.base, lambda place: read_basis(self.blob(place)), self.width)

    def report(self) -> dict[str, Any]:
        """How much of the model stays, and of its signals."""
        parameters = self.model.plan.num_parameters
        return {
            "parameters": parameters,
            "share_of_the_base": parameters / self.base.plan.num_parameters,
            "width": self.width,
            "width_of_the_base": dense_width(self.base.plan),
            "kept_of_signals": self.kept,
        }
