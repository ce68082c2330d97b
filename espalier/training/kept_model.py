"""The model that was last trained in this process, kept for its next message.

A node that stays warm, and a simulation's worker, answer round after round with the same base and the same adapters; loading
the weights, quantising them and putting the adapters in would take longer than a short round. Each thread keeps one model at
most, as long as the model's files, its adapters and how it is computed stay the same: another one takes its place.

Covers: a model that is lent again is as it was when it was loaded, whatever it was trained to. Does not cover: hooks and
modules that a method puts into ``whole``, which it takes out itself.
"""

import gc
import threading
from dataclasses import dataclass
from pathlib import Path

from espalier.modeling.computing import Computing
from espalier.modeling.opened import OpenedModel
from espalier.settings.run import RunSettings
from espalier.training.adapted import AdaptedModel
from espalier.wire.adapters import AdapterPlan, Tensors


@dataclass(frozen=True)
class _Kept:
    made_for: tuple[object, ...]
    adapted: AdaptedModel
    first: Tensors
    """What was trained, as it was before."""


class _Shelf(threading.local):
    kept: _Kept | None = None


_SHELF = _Shelf()


def kept_model(
    model: OpenedModel,
    computing: Computing,
    settings: RunSettings,
    adapters: AdapterPlan,
    cache_folder: Path | None = None,
) -> AdaptedModel:
    """``AdaptedModel.load``, or the same model again where this thread loaded it last.

    ``model`` is the same if it is the same object: ``open_model`` gives that while the files stay as they are.

    Raises
    ------
    Mistake
        See ``AdaptedModel.load``.
    """
    chosen = settings.training
    made_for = (
        model,
        computing,
        chosen.base,
        chosen.double_quantisation,
        settings.lora.dropout,
        settings.seed,
        adapters,
    )
    kept = _SHELF.kept
    if kept is None or kept.made_for != made_for:
        forget_model()  # before another one takes as much memory
        adapted = AdaptedModel.load(model, computing, settings, adapters, cache_folder)
        kept = _SHELF.kept = _Kept(made_for, adapted, adapted.values())
    adapted = AdaptedModel(
        kept.adapted.whole, {key: dict(block) for key, block in kept.adapted.parameters.items()}
    )
    adapted.whole.eval()
    adapted.set(kept.first)
    for parameter in (
        parameter for block in adapted.parameters.values() for parameter in block.values()
    ):
        parameter.requires_grad_(True)
        parameter.grad = None
    return adapted


def forget_model() -> None:
    """Free the memory of the model that this thread keeps.

    peft's modules and their hooks refer to each other, so that the collector alone frees them; else a client whose model
    changes, as FedSpine's does, would hold the one before beside it. What is there besides, libraries above all, is looked
    through once, and then left out of the collector's rounds, which it would make a third of a second long.
    """
    if _SHELF.kept is not None:
        _SHELF.kept = None
        gc.collect()
        if not gc.get_freeze_count():
            gc.freeze()
