"""Centralized baselines: a method on the pooled data of all clients.

They exist only in simulation, where all data are in one place. Training takes as many steps as the
clients of all rounds together with their batch size, so it processes the same number of sequences.
"""

from functools import reduce

import torch
from torch import Tensor

from espalier.amounts import count
from espalier.data.client_text import client_samples
from espalier.hf.group_scores.flap import flap_cuts, watched_moments
from espalier.hf.group_scores.mask_tuning import tuned_by_one
from espalier.hf.group_scores.streamline import (
    first_layer,
    most_similar_stretch,
    open_streamlined,
    stretch_cosines,
)
from espalier.hf.opening.opened_model import OpenedModel
from espalier.hf.sliced.rotated_checkpoint import SlicedModel
from espalier.hf.sliced.signals import basis_of, mean_moments
from espalier.hf.stream.block_stream import BlockStream
from espalier.hf.stream.calibration import prune_by_block, prune_layers
from espalier.hf.stream.edits import Edits, masked, replaced
from espalier.hf.stream.input_statistics import watch_for
from espalier.hf.stream.pooled_sums import pooled_masks
from espalier.hf.structured.selection import open_cut
from espalier.hf.whole.inner_matrices import plain_tensors
from espalier.messages.blobs.mask_tensors import pack_kept, pack_masks, unpack_kept, unpack_masks
from espalier.methods.pruning.fedprllm import FedPrLLMSettings
from espalier.methods.pruning.fedspallm import FedSpaLLMSettings
from espalier.methods.pruning.flap import FlapSettings, biases
from espalier.methods.pruning.llm_pruner import LlmPrunerSettings
from espalier.methods.pruning.llm_streamline import LlmStreamlineSettings
from espalier.methods.pruning.pooled_pruning import PooledPruningSettings
from espalier.methods.pruning.slicegpt import SliceGptSettings, dense_width, places
from espalier.methods.tuning.adapters.tensors import of_all_rounds, trained
from espalier.seeds import derive_seed
from espalier.settings.node import simulated_node
from espalier.storage.blobs import BlobStore
from espalier.training.adapter_training import AdapterTraining
from espalier.training.initial_values import initial_values
from espalier.training.replacement import Replacement, Stretch
from espalier.training.sequences import client_sequences
from pruning_kernels.selection.local_pruning import LocalPruning
from strategies.base.run import Run

SCRATCH = "centralized"
"""Folder in the run directory for blobs of a baseline; it is deleted after the evaluation."""


def _samples_of(run: Run, client: int) -> Tensor:
    """Return the calibration samples of one client, (samples, tokens), int64."""
    # A simulated node has no data besides the run's [data] table.
    return client_samples(run.settings, simulated_node(), run.model.encode, client)


def pooled_samples(run: Run) -> Tensor:
    """Return the calibration samples of all clients, (samples, tokens), int64."""
    samples = torch.cat([_samples_of(run, client) for client in range(run.settings.num_clients)])
    run.progress.begin("centralized", len(run.model.plan.blocks))
    return samples


def _tell(run: Run, index: int, samples: Tensor) -> None:
    """Show that a block is finished."""
    text = f"block {index}, {count(len(samples), 'sample')}"
    run.progress.step("centralized", text, block=index)


def masked_by_all(run: Run) -> Edits:
    """Return the edits by which one client of FedPrLLM with all samples would prune the model.

    The masks are in ``SCRATCH``, one blob per block.
    """
    stream = BlockStream(run.model, run.computing)
    store = BlobStore(run.folder.path / SCRATCH)
    samples = pooled_samples(run)
    # The server's metric with the clients' local settings.
    job = run.settings.of(FedPrLLMSettings)
    pooled = LocalPruning(job.metric, job.sparsity, job.local_group)
    hashes = []
    for index, masks in prune_by_block(stream, samples, pooled.prune_mask, watch_for(pooled)):
        hashes.append(store.put(pack_masks(masks)))
        _tell(run, index, samples)
    return masked(
        lambda index: unpack_masks(run.model.plan.blocks[index], store.get(hashes[index]))
    )


def pooled_by_all(run: Run) -> Edits:
    """Return the edits by which pooled pruning of all samples in one place would prune the model.

    Sums are float64 and never in fixed point. Each client's samples are in batches of their own, as
    in the run, because the forward pass may round differently in other batches.
    """
    stream = BlockStream(run.model, run.computing)
    store = BlobStore(run.folder.path / SCRATCH)
    # Batches may not mix clients: their forward passes would round otherwise.
    parties = [_samples_of(run, client) for client in range(run.settings.num_clients)]
    run.progress.begin("centralized", len(run.model.plan.blocks))
    hashes = []
    for index, masks in enumerate(
        pooled_masks(stream, parties, run.settings.of(PooledPruningSettings))
    ):
        hashes.append(store.put(pack_masks(masks)))
        _tell(run, index, torch.cat(parties))
    return masked(
        lambda index: unpack_masks(run.model.plan.blocks[index], store.get(hashes[index]))
    )


def reconstructed_by_all(run: Run) -> Edits:
    """Return the edits by which one client of FedSpaLLM with all samples would prune the model.

    The client samples every layer and prunes directly to the final sparsity. Its layers are in
    ``SCRATCH``.
    """
    stream = BlockStream(run.model, run.computing)
    store = BlobStore(run.folder.path / SCRATCH)
    samples = pooled_samples(run)
    job = run.settings.of(FedSpaLLMSettings)
    plan = run.model.plan
    pooled = LocalPruning(job.local_method, job.sparsity, job.local_group, job.damping_mean)
    hashes = []
    for layer in prune_layers(stream, samples, pooled, range(len(plan.blocks))):
        hashes.append(store.put(pack_kept(layer.matrices)))
        _tell(run, layer.index, samples)
    return replaced(
        lambda i: {
            name: m.weight()
            for name, m in unpack_kept(plan.blocks[i], store.get(hashes[i])).items()
        }
    )


def flap_of_all(run: Run) -> OpenedModel:
    """Return the model by FLAP on the pooled samples of all clients."""
    stream = BlockStream(run.model, run.computing)
    moments = []
    samples = pooled_samples(run)
    for index, block_moments in enumerate(watched_moments(stream, samples)):
        moments.append(block_moments)
        _tell(run, index, samples)
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
    start = most_similar_stretch(
        stretch_cosines(stream, samples, span, after_norm=job.compares_after_norm)
    )
    run.progress.step("centralized", f"{count(len(samples), 'sample')} compared", block=start)
    if job.replacement == "none":
        return open_streamlined(run.model, start, span, None)
    # As many steps as all clients of all rounds together.
    steps = run.settings.num_clients * run.settings.federation.rounds * job.steps
    seed = derive_seed(run.settings.seed, "training/centralized")
    training = Replacement(Stretch.walked(stream, samples, start, span), job.training, seed, steps)
    layer, _ = training.run(first_layer(run.model, start), 0, steps)
    return open_streamlined(run.model, start, span, layer)


def slicegpt_of_all(run: Run) -> OpenedModel:
    """Return the model by SliceGPT on the pooled samples of all clients."""
    width = run.settings.of(SliceGptSettings).width(dense_width(run.model.plan))
    samples = pooled_samples(run)
    bases = []
    moments = mean_moments(BlockStream(run.model, run.computing), samples)
    for name, moment in zip(places(run.model.plan), moments, strict=True):
        bases.append(basis_of(moment, width)[0])
        if name.endswith("-mlp"):
            run.progress.step(
                "centralized", f"{name.removesuffix('-mlp')}, {count(len(samples), 'sample')}"
            )
    return SlicedModel(run.model, bases.__getitem__, width)


def tuned(run: Run) -> dict[str, dict[str, Tensor]]:
    """Train the run's adapters on all clients' sequences; return them by blob key and name."""
    settings = run.settings
    # ``clients`` read the run's own data, since a simulated node has none.
    nowhere = simulated_node()
    clients = range(settings.num_clients)
    adapters = of_all_rounds(trained(run.model.plan, settings), settings)
    training = AdapterTraining(
        model=run.model,
        computing=run.computing,
        settings=settings,
        adapters=adapters,
        # Sequences of all clients as one data set.
        sequences=reduce(
            lambda first, other: first.joined(other),
            (client_sequences(settings, nowhere, run.model, client) for client in clients),
        ),
        seed=derive_seed(settings.seed, "training/centralized"),
        parties=settings.federation.clients_of_round(settings.num_clients),
    )
    run.progress.begin("centralized", 1)
    start = initial_values(run.model, adapters, settings.seed)
    tensors, _ = training.run(start, 0, training.total_steps)
    done = f"{count(training.total_steps, 'step')}, {count(training.num_sequences, 'sequence')}"
    run.progress.step("centralized", done)
    # As plain adapters, for the evaluation.
    return {key: plain_tensors(adapters, key, block) for key, block in tensors.items()}
