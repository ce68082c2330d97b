"""Cache of the model that a process trained last, for its next message.

A warm node and a simulation's worker answer round after round with the same base and the same
adapters. To load the weights, quantise them and insert the adapters can take longer than a short
round. Each thread caches at most one model. It is reused while the model's files, its adapters and
the settings of its computation stay the same, and else replaced.

Covers: a reused model has its initial values, independent of earlier training.
Does not cover: hooks and modules that a method adds to ``whole``; the method has to remove them.
"""

import gc
import threading
from dataclasses import dataclass
from pathlib import Path

from espalier.hf.machine.computing import Computing
from espalier.hf.opening.opened_model import OpenedModel
from espalier.models.adapters import AdapterPlan, Tensors
from espalier.settings.run import RunSettings
from espalier.training.adapted_model import AdaptedModel, flattened


@dataclass(frozen=True)
class _Kept:
    made_for: tuple[object, ...]
    adapted: AdaptedModel
    first: Tensors
    """Initial values of the trained parameters."""


_SHELF = threading.local()
_FROZEN = threading.Event()
"""Set once the objects of libraries are excluded from collections.

``gc.get_freeze_count`` is no substitute: it counts the objects one by one.
"""


def kept_model(
    model: OpenedModel,
    computing: Computing,
    settings: RunSettings,
    adapters: AdapterPlan,
    cache_folder: Path | None = None,
) -> AdaptedModel:
    """Return a model as ``AdaptedModel.load`` does, from the cache of this thread if possible.

    The cache compares ``model`` by identity: ``open_model`` returns the same object while the files
    do not change.
    """
    dropout = settings.lora.dropout
    made_for = (model, computing, settings.training.base, dropout, settings.seed, adapters)
    kept: _Kept | None = getattr(_SHELF, "kept", None)
    # Dropout is part of the modules, and the seed determines the initial values.
    if kept is None or kept.made_for != made_for:
        # Frees the old model first, because the new one needs as much memory.
        forget_model()
        adapted = AdaptedModel.load(model, computing, settings, adapters, cache_folder)
        kept = _SHELF.kept = _Kept(made_for, adapted, adapted.values())
    # A new object with new dictionaries, so that tensors that a method adds are not in the cache.
    adapted = AdaptedModel(
        kept.adapted.whole, {key: dict(block) for key, block in kept.adapted.parameters.items()}
    )
    # As after loading, whatever a method did before.
    adapted.whole.eval()
    adapted.set(kept.first)
    for parameter in flattened(adapted.parameters).values():
        parameter.requires_grad_(True)
        parameter.grad = None
    return adapted


def forget_model() -> None:
    """Free the memory of the model that this thread caches.

    The modules and hooks of peft form reference cycles, so only the garbage collector frees them.
    Without a collection a client whose model changes, as in FedSpine, would hold two models. The
    objects that remain, mostly those of libraries, are excluded from later collections, which would
    otherwise take a third of a second each.
    """
    if getattr(_SHELF, "kept", None) is not None:
        _SHELF.kept = None
        gc.collect()
        if not _FROZEN.is_set():
            _FROZEN.set()
            gc.freeze()
