"""Centralized baseline of SliceGPT; only in simulation, where all data are in one place."""

from espalier.amounts import count
from espalier.modeling.block_stream import BlockStream
from espalier.modeling.opened import OpenedModel
from espalier.modeling.sliced.opened_sliced import SlicedModel
from espalier.modeling.sliced.signals import basis_of, mean_moments
from espalier.settings.slicegpt import SliceGptSettings
from espalier.wire.slicegpt import dense_width, places
from strategies.baselines.centralized import pooled_windows
from strategies.engine.run import Run


def slicegpt_of_all(run: Run) -> OpenedModel:
    """Return the model by SliceGPT on the pooled samples of all clients."""
    width = run.settings.of(SliceGptSettings).width(dense_width(run.model.plan))
    windows = pooled_windows(run)
    found = []
    moments = mean_moments(BlockStream(run.model, run.computing), windows)
    for name, own in zip(places(run.model.plan), moments, strict=True):
        found.append(basis_of(own, width)[0])
        if name.endswith("-mlp"):
            run.progress.step(
                "centralized", f"{name.removesuffix('-mlp')}, {count(len(windows), 'window')}"
            )
    return SlicedModel(run.model, found.__getitem__, width)
