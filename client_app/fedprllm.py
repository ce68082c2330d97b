"""FedPrLLM at a client (papers: section 3.2, step 1): prune the model with one's own text, and vote with the mask.

The mask travels; calibration tokens, activations and scores never do. What later messages need again (the masks, to
evaluate them or to hand out further parts) stays in the client's private state.
"""

import time

import torch

from client_app.parts import hand_out
from client_app.site import Site, reply_to
from espalier.corpora.client_text import client_windows
from espalier.corpora.windows import windows_sha256
from espalier.evaluation.perplexity import mean_losses
from espalier.modeling.block_stream import BlockStream
from espalier.modeling.calibration import prune_by_block
from espalier.modeling.edits import masked
from espalier.settings.mistakes import Mistake
from espalier.storage.private import PrivateState
from espalier.wire.evaluation import WINDOWS_BLOB, LocalLoss
from espalier.wire.fedprllm import VoteReport, block_parts
from espalier.wire.masks import pack_masks, unpack_masks
from espalier.wire.messages import Letter, validate
from espalier.wire.payload import block_key, unpack_tensors
from pruning_kernels.local import LocalPruning
from pruning_kernels.scores import NotFiniteError

fetch = hand_out


def train(site: Site, request: Letter) -> Letter:
    """Prune locally and reply with the first part of the masks; a repeated request is answered from what was kept."""
    header = request.header
    state = site.state(header)
    with state.locked():
        saved = state.load(header.server_round, "report")
        report = validate(VoteReport, saved) if saved is not None else _vote(site, state, header.rank, header.server_round)
        state.save(header.server_round, "report", report.model_dump())
        state.collect_garbage(header.server_round)
    store = state.blobs(header.server_round)
    first_part = block_parts(site.model.plan, site.settings.part_bytes)[0]
    return reply_to(request, report, {block_key(index): store.get(report.blob_sha256[index]) for index in first_part})


def _vote(site: Site, state: PrivateState, rank: int, server_round: int) -> VoteReport:
    """Prune the model block by block and keep each block's masks as soon as they are made."""
    started = time.monotonic()
    job = site.settings.fedprllm
    windows = client_windows(site.settings, site.node, site.model.encode, rank)
    stream = BlockStream(site.model, site.computing)
    store = state.blobs(server_round)
    local = LocalPruning(job.local_metric, job.sparsity, job.local_comparison_group)
    try:
        hashes = [store.put(pack_masks(masks)) for _, masks in prune_by_block(stream, windows, local.prune_mask)]
    except NotFiniteError as error:
        raise Mistake(str(error)) from error
    return VoteReport(
        seconds=time.monotonic() - started,
        calibration_tokens=windows.numel(),
        calibration_sha256=windows_sha256(windows),
        blob_sha256=hashes,
    )


def evaluate(site: Site, request: Letter) -> Letter:
    """Loss of this client's own pruned model on the public text that the server sent along."""
    started = time.monotonic()
    header = request.header
    state = site.state(header)
    saved = state.load(header.server_round, "report")
    if saved is None:
        raise Mistake(f"evaluate: this client kept no masks of round {header.server_round}; run the round again")
    report, store = validate(VoteReport, saved), state.blobs(header.server_round)

    def own_masks(index: int) -> dict[str, torch.Tensor]:
        return unpack_masks(site.model.plan.blocks[index], store.get(report.blob_sha256[index]))

    arrays = unpack_tensors(request.blobs[WINDOWS_BLOB])
    texts = {name: torch.from_numpy(arrays[name]).to(torch.int64) for name in request.scalars["names"]}
    losses = mean_losses(BlockStream(site.model, site.computing), texts, masked(own_masks))
    return reply_to(request, LocalLoss(losses=list(losses.values()), seconds=time.monotonic() - started))
