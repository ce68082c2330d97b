"""Centralized baseline of FedPrLLM and FedSpaLLM: pruning with all clients' samples (section 4.1).

It needs all data in one place, so it exists only in simulation.
"""

import torch
from torch import Tensor

from espalier.amounts import count
from espalier.data.client_text import client_samples
from espalier.hf.stream.block_stream import BlockStream
from espalier.hf.stream.calibration import prune_by_block, prune_layers
from espalier.hf.stream.edits import Edits, masked, replaced
from espalier.hf.stream.input_statistics import watch_for
from espalier.messages.blobs.mask_tensors import pack_masks, unpack_masks
from espalier.messages.blobs.pruned_matrices import pack_kept, unpack_kept
from espalier.methods.fedprllm import FedPrLLMSettings
from espalier.methods.fedspallm import FedSpaLLMSettings
from espalier.settings.node import simulated_node
from espalier.storage.blobs import BlobStore
from pruning_kernels.selection.local import LocalPruning
from strategies.base.run import Run


def pooled_samples(run: Run) -> Tensor:
    """Return the calibration samples of all clients, (samples, tokens), int64."""
    # A simulated node has no data besides the run's [data] table.
    nowhere = simulated_node()
    clients = range(run.settings.num_clients)
    samples = torch.cat(
        [client_samples(run.settings, nowhere, run.model.encode, client) for client in clients]
    )
    run.progress.begin("centralized", len(run.model.plan.blocks))
    return samples


def masked_by_all(run: Run, stream: BlockStream, store: BlobStore) -> Edits:
    """Prune with all samples as one client of FedPrLLM would; remaining weights do not change.

    Returns
    -------
    Edits
        Edits that turn the dense model into the pruned one. The masks are in ``store``, one blob
        per block.
    """
    samples = pooled_samples(run)
    job = run.settings.of(FedPrLLMSettings)
    pooled = LocalPruning(job.local_metric, job.sparsity, job.local_group)
    hashes = []
    for index, masks in prune_by_block(stream, samples, pooled.prune_mask, watch_for(pooled)):
        hashes.append(store.put(pack_masks(masks)))
        run.progress.step(
            "centralized", f"block {index}, {count(len(samples), 'sample')}", block=index
        )
    return masked(
        lambda index: unpack_masks(run.model.plan.blocks[index], store.get(hashes[index]))
    )


def reconstructed_by_all(run: Run, stream: BlockStream, store: BlobStore) -> Edits:
    """Prune with all samples as one client of FedSpaLLM would.

    The client samples every layer and prunes directly to the final sparsity.
    """
    samples = pooled_samples(run)
    job = run.settings.of(FedSpaLLMSettings)
    plan = run.model.plan
    pooled = LocalPruning(job.local_method, job.sparsity, job.local_group, job.damping_mean)
    hashes = []
    for layer in prune_layers(stream, samples, pooled, range(len(plan.blocks))):
        hashes.append(store.put(pack_kept(layer.matrices)))
        run.progress.step(
            "centralized",
            f"block {layer.index}, {count(len(samples), 'sample')}",
            block=layer.index,
        )
    return replaced(
        lambda i: {
            name: m.weight()
            for name, m in unpack_kept(plan.blocks[i], store.get(hashes[i])).items()
        }
    )
