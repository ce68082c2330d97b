"""The centralized baseline: one party prunes with the calibration windows of all clients (FedPrLLM section 4.1).

It needs everybody's data in one place, so it exists in simulation only, where the data are already in one place.
"""

import torch
from torch import Tensor

from espalier.corpora.client_text import client_windows
from espalier.modeling.block_stream import BlockStream
from espalier.modeling.calibration import prune_by_block, prune_layers
from espalier.modeling.edits import Edits, masked, replaced
from espalier.modeling.input_statistics import watch_for
from espalier.settings.node import simulated_node
from espalier.storage.blobs import BlobStore
from espalier.wire.mask_tensors import pack_masks, unpack_masks
from espalier.wire.pruned_matrices import pack_kept, unpack_kept
from pruning_kernels.local import LocalPruning
from strategies.engine.run import Run


def centralized(run: Run, stream: BlockStream, store: BlobStore) -> Edits:
    """Prune with the pooled windows of all clients, as one of them would; what is pruned is kept in ``store``, block by block.

    Returns
    -------
    Edits
        What makes the dense model the pruned one.
    """
    nowhere = simulated_node()  # a simulated node has no data of its own beside the run's [data]
    clients = range(run.settings.num_clients)
    windows = torch.cat([client_windows(run.settings, nowhere, run.model.encode, client) for client in clients])
    run.progress.begin("centralized", len(run.model.plan.blocks))
    return (_masked if run.settings.method == "fedprllm" else _reconstructed)(run, stream, store, windows)


def _masked(run: Run, stream: BlockStream, store: BlobStore, windows: Tensor) -> Edits:
    """As a client of FedPrLLM: masks, the kept weights stay."""
    job = run.settings.fedprllm
    pooled = LocalPruning(job.local_metric, job.sparsity, job.local_group)
    hashes = []
    for index, masks in prune_by_block(stream, windows, pooled.prune_mask, watch_for(pooled)):
        hashes.append(store.put(pack_masks(masks)))
        run.progress.step("centralized", f"block {index}, {len(windows)} windows", block=index)
    return masked(lambda index: unpack_masks(run.model.plan.blocks[index], store.get(hashes[index])))


def _reconstructed(run: Run, stream: BlockStream, store: BlobStore, windows: Tensor) -> Edits:
    """As a client of FedSpaLLM that samples every layer, at the final sparsity at once."""
    job, plan = run.settings.fedspallm, run.model.plan
    pooled = LocalPruning(job.local_method, job.sparsity, job.local_group, job.damping, job.damping_mean)
    hashes = []
    for layer in prune_layers(stream, windows, pooled, range(len(plan.blocks))):
        hashes.append(store.put(pack_kept(layer.matrices)))
        run.progress.step("centralized", f"block {layer.index}, {len(windows)} windows", block=layer.index)
    return replaced(lambda i: {name: m.weight() for name, m in unpack_kept(plan.blocks[i], store.get(hashes[i])).items()})
