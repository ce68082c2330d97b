"""Result of SliceGPT: one basis of the residual stream per place, in the checkpoint's blobs."""

from typing import Any

from torch import Tensor

from espalier.hf.opening.opened import OpenedModel
from espalier.hf.sliced.opened_sliced import SlicedModel
from espalier.hf.sliced.signals import basis_of, pack_basis, read_basis
from espalier.methods.slicegpt import dense_width
from espalier.storage.blobs import BlobStore

STATE = ("bases", "kept")
"""Attributes that a checkpoint stores."""


class SlicedResult:
    """Sliced model, available when its bases are computed.

    Parameters
    ----------
    model : base model
    store : store for the bases, in a run that of the checkpoint
    width : width of the residual stream after slicing
    """

    def __init__(self, model: OpenedModel, store: BlobStore, width: int) -> None:
        self.base = model
        self.store = store
        self.width = width
        self.bases: list[str] = []
        """Hash of each place's blob."""
        self.kept: list[float] = []
        """Fraction of the signals' squared norm that each basis retains."""

    def state(self) -> dict[str, Any]:
        """Return hashes and fractions."""
        return {name: getattr(self, name) for name in STATE}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the state that ``state`` returned."""
        for name in STATE:
            setattr(self, name, state[name])

    def stored(self) -> list[str]:
        """Return the hashes of all blobs that the state names."""
        return self.bases

    def take(self, moments: Tensor) -> float:
        """Compute and store the basis of the next place; return the fraction that it retains."""
        basis, kept = basis_of(moments, self.width)
        self.bases.append(self.store.put(pack_basis(basis)))
        self.kept.append(kept)
        return kept

    def blob(self, place: int) -> bytes:
        """Return the basis of a place as it is sent."""
        return self.store.get(self.bases[place])

    @property
    def model(self) -> SlicedModel:
        """Sliced model, whose tensors are computed when they are read."""
        return SlicedModel(self.base, lambda place: read_basis(self.blob(place)), self.width)

    def report(self) -> dict[str, Any]:
        """Return size, remaining fraction and width of the model, and the retained fractions."""
        parameters = self.model.plan.num_parameters
        return {
            "parameters": parameters,
            "share_of_the_base": parameters / self.base.plan.num_parameters,
            "width": self.width,
            "width_of_the_base": dense_width(self.base.plan),
            "kept_of_signals": self.kept,
        }
