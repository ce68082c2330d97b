"""Centralized baseline of SliceGPT; only in simulation, where all data are in one place."""

from espalier.amounts import count
from espalier.hf.opening.opened import OpenedModel
from espalier.hf.sliced.opened_sliced import SlicedModel
from espalier.hf.sliced.signals import basis_of, mean_moments
from espalier.hf.stream.block_stream import BlockStream
from espalier.methods.slicegpt import SliceGptSettings, dense_width, places
from strategies.base.run import Run
from strategies.baselines.centralized import pooled_samples


def slicegpt_of_all(run: Run) -> OpenedModel:
    """Return the model by SliceGPT on the pooled samples of all clients."""
    width = run.settings.of(SliceGptSettings).width(dense_width(run.model.plan))
    samples = pooled_samples(run)
    found = []
    moments = mean_moments(BlockStream(run.model, run.computing), samples)
    for name, own in zip(places(run.model.plan), moments, strict=True):
        found.append(basis_of(own, width)[0])
        if name.endswith("-mlp"):
            run.progress.step(
                "centralized", f"{name.removesuffix('-mlp')}, {count(len(samples), 'sample')}"
            )
    return SlicedModel(run.model, found.__getitem__, width)
