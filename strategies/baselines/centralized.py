"""The centralized baseline: one party prunes with the calibration windows of all clients (FedPrLLM section 4.1).

It needs everybody's data in one place, so it exists in simulation only, where the data are already in one place.
"""

import torch

from espalier.corpora.client_text import client_windows
from espalier.modeling.block_stream import BlockStream
from espalier.modeling.calibration import prune_by_block
from espalier.modeling.edits import PruneMasks
from espalier.modeling.input_statistics import watch_for
from espalier.settings.node import NodeSettings
from espalier.storage.blobs import BlobStore
from espalier.wire.masks import pack_masks, unpack_masks
from pruning_kernels.local import LocalPruning
from strategies.run import Run


def centralized_masks(run: Run, stream: BlockStream, store: BlobStore) -> PruneMasks:
    """Prune with the pooled windows of all ranks; the masks are kept in ``store``, block by block.

    Returns
    -------
    PruneMasks
        Prune masks of each block.
    """
    job = run.settings.fedprllm
    nowhere = NodeSettings()  # a simulated node has no data of its own beside the run's [data]
    ranks = range(run.settings.num_clients)
    windows = torch.cat([client_windows(run.settings, nowhere, run.model.encode, rank) for rank in ranks])
    pooled = LocalPruning(job.local_metric, job.sparsity, job.local_group)
    run.progress.begin("centralized", len(run.model.plan.blocks))
    hashes = []
    for index, masks in prune_by_block(stream, windows, pooled.prune_mask, watch_for(pooled)):
        hashes.append(store.put(pack_masks(masks)))
        run.progress.step("centralized", f"block {index}, {len(windows)} windows", block=index)
    return lambda index: unpack_masks(run.model.plan.blocks[index], store.get(hashes[index]))
