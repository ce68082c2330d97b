"""Centralized baselines of structured methods; only in simulation, with all data in one place."""

from espalier.amounts import count
from espalier.hf.group_scores.flap import flap_cuts, watched_moments
from espalier.hf.group_scores.mask_tuning import tuned_by_one
from espalier.hf.group_scores.streamline import (
    first_layer,
    likest,
    open_streamlined,
    stretch_cosines,
)
from espalier.hf.opening.opened import OpenedModel
from espalier.hf.stream.block_stream import BlockStream
from espalier.hf.structured.opened_cut import open_cut
from espalier.methods.flap import FlapSettings, biases
from espalier.methods.llm_pruner import LlmPrunerSettings
from espalier.methods.llm_streamline import LlmStreamlineSettings
from espalier.seeds import derive_seed
from espalier.training.replacement import Replacement, Stretch
from strategies.base.run import Run
from strategies.baselines.centralized import pooled_samples


def flap_of_all(run: Run) -> OpenedModel:
    """Return the model by FLAP on the pooled samples of all clients."""
    stream = BlockStream(run.model, run.computing)
    moments = []
    samples = pooled_samples(run)
    for index, found in enumerate(watched_moments(stream, samples)):
        moments.append(found)
        run.progress.step(
            "centralized", f"block {index}, {count(len(samples), 'sample')}", block=index
        )
    cuts = list(flap_cuts(run.model, moments.__getitem__, run.settings.of(FlapSettings)))
    return open_cut(run.model, cuts.__getitem__, biases(run.settings))


def llm_pruner_of_all(run: Run) -> OpenedModel:
    """Return the model by LLM-Pruner on the pooled samples of all clients."""
    job = run.settings.of(LlmPrunerSettings)
    samples = pooled_samples(run)
    blobs = tuned_by_one(run.model, run.computing, samples, job, run.settings.data.num_samples)
    run.progress.step(
        "centralized", f"{count(len(blobs), 'block')}, {count(len(samples), 'sample')}"
    )
    return open_cut(run.model, blobs.__getitem__, ())


def llm_streamline_of_all(run: Run) -> OpenedModel:
    """Return the model by LLM-Streamline on the pooled samples of all clients.

    It takes as many training steps as all clients together.
    """
    job = run.settings.of(LlmStreamlineSettings)
    samples = pooled_samples(run)
    stream = BlockStream(run.model, run.computing)
    span = job.span(len(run.model.plan.blocks))
    start = likest(stretch_cosines(stream, samples, span, after_norm=job.compares_after_norm))
    run.progress.step("centralized", f"{count(len(samples), 'sample')} compared", block=start)
    if job.replacement == "none":
        return open_streamlined(run.model, start, span, None)
    steps = run.settings.num_clients * run.settings.federation.rounds * job.steps
    seed = derive_seed(run.settings.seed, "training/centralized")
    training = Replacement(Stretch.walked(stream, samples, start, span), job.training, seed, steps)
    layer, _ = training.run(first_layer(run.model, start), 0, steps)
    return open_streamlined(run.model, start, span, layer)
