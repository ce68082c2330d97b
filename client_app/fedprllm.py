"""FedPrLLM at a client (papers: section 3.2, step 1): prune the model with one's own text, and vote with the mask.

The mask travels; calibration tokens, activations and scores never do. What later messages need again (masks, to evaluate
them or to hand out further parts, and hidden states between the rounds of iterative pruning) stays in the private state.
"""

import time
from typing import Any

import torch

from client_app.delivery import taken
from client_app.evaluation import answer, require_own_text
from client_app.kernel_mistakes import mistakes_of_kernels
from client_app.site import Site, reply_to
from espalier.corpora.client_text import client_windows
from espalier.corpora.windows import windows_sha256
from espalier.modeling.block_stream import BlockStream
from espalier.modeling.calibration import choose_in_dense_block, prune_by_block
from espalier.modeling.edits import Edits, masked, masked_and_scaled
from espalier.modeling.input_statistics import watch_for
from espalier.settings.mistakes import Mistake
from espalier.storage.blobs import BlobStore
from espalier.storage.private import PrivateState
from espalier.wire.fedprllm import (
    Decision,
    VoteReport,
    block_parts,
    blocks_of_round,
    decided_parts,
    votes_key,
)
from espalier.wire.mask_tensors import kept_shares, pack_masks, unpack_masks
from espalier.wire.messages import Header, Letter, validate
from espalier.wire.payload import block_key, pack_tensors, unpack_tensors
from pruning_kernels.local import LocalPruning


def train(site: Site, request: Letter) -> Letter:
    """Prune locally and reply with the first part of the masks; a repeated request is answered from what was kept."""
    header, job = request.header, site.settings.fedprllm
    state = site.state(header)
    with state.locked():
        saved = state.load(header.server_round, "report")
        if saved is not None and saved.pop("settings") == site.settings.digest():
            report = validate(VoteReport, saved)
        else:
            require_own_text(site, header)
            report = (
                _vote_on_all_blocks(site, state, header)
                if job.strategy == "one-shot"
                else _vote_on_one_block(site, state, request)
            )
        state.save(header.server_round, "report", {**report.model_dump(), "settings": site.settings.digest()})
        state.collect_garbage(header.server_round)
    store = state.blobs(header.server_round)
    blocks = blocks_of_round(site.model.plan, job, header.server_round)
    hashes = dict(zip(blocks, report.blob_sha256, strict=True))
    first_part = block_parts(site.model.plan, job, header.server_round, site.settings.part_bytes)[0]
    return reply_to(request, report, {block_key(index): store.get(hashes[index]) for index in first_part})


def _vote_on_all_blocks(site: Site, state: PrivateState, header: Header) -> VoteReport:
    """One-shot: prune the model block by block and keep each block's masks as soon as they are made."""
    started = time.monotonic()
    windows = client_windows(site.settings, site.node, site.model.encode, header.rank)
    hashes = _prune_alone(site, windows, state.blobs(header.server_round))
    return _report(windows, hashes, started)


def _vote_on_one_block(site: Site, state: PrivateState, request: Letter) -> VoteReport:
    """Iterative: apply the server's decision to the block before, go through it, and vote on the next (section 3.2.3).

    The hidden states before the round's block stay in the private state of the round; the next round starts from them.
    """
    started = time.monotonic()
    server_round = request.header.server_round
    stream, store = BlockStream(site.model, site.computing), state.blobs(server_round)
    if server_round == 1:
        windows = client_windows(site.settings, site.node, site.model.encode, request.header.rank)
        activations = stream.start(windows)
    else:
        kept = state.load(server_round - 1, "activations")
        if kept is None:
            raise Mistake(f"train: this client kept no hidden states of round {server_round - 1}; it cannot join later")
        earlier, before = state.blobs(server_round - 1), server_round - 2
        windows = _kept_windows(earlier, kept)
        with earlier.opened(kept["hidden"]) as hidden:
            activations = stream.resume(windows, hidden)
        decided = unpack_masks(site.model.plan.blocks[before], request.blobs[block_key(before)])
        with torch.no_grad(), stream.block(before, masked(lambda _: decided)(before), before + 1) as block:
            activations.through(before, block)
    kept = {"windows": store.put(pack_tensors({"": windows.numpy()})), "hidden": store.put_pieces(activations.pieces())}
    state.save(server_round, "activations", kept)
    with mistakes_of_kernels():
        pruning = _local_pruning(site)
        masks = choose_in_dense_block(stream, activations, server_round - 1, pruning.prune_mask, watch_for(pruning))
    return _report(windows, [store.put(pack_masks(masks))], started)


def _kept_windows(store: BlobStore, kept: dict[str, Any]) -> torch.Tensor:
    return torch.from_numpy(unpack_tensors(store.get(kept["windows"]))[""])


def _prune_alone(site: Site, windows: torch.Tensor, store: BlobStore) -> list[str]:
    """Prune all blocks with this client's windows alone; returns the hash of each block's masks in the store."""
    stream = BlockStream(site.model, site.computing)
    with mistakes_of_kernels():
        pruning = _local_pruning(site)
        pruned = prune_by_block(stream, windows, pruning.prune_mask, watch_for(pruning))
        return [store.put(pack_masks(masks)) for _, masks in pruned]


def _local_pruning(site: Site) -> LocalPruning:
    job = site.settings.fedprllm
    return LocalPruning(job.local_metric, job.sparsity, job.local_group)


def _report(windows: torch.Tensor, hashes: list[str], started: float) -> VoteReport:
    return VoteReport(
        seconds=time.monotonic() - started,
        calibration_tokens=windows.numel(),
        calibration_sha256=windows_sha256(windows),
        blob_sha256=hashes,
    )


def evaluate(site: Site, request: Letter) -> Letter:
    """Loss of this client's own pruned model on the public text that the server sent along, and of all on its own text."""
    store, hashes = _own_masks(site, request.header)
    alone = masked(lambda index: unpack_masks(site.model.plan.blocks[index], store.get(hashes[index])))
    return answer(site, request, alone, lambda: _federated(site, request.header))


def _federated(site: Site, header: Header) -> Edits:
    """What the server decided, as it was delivered."""
    plan, scaled = site.model.plan, site.settings.fedprllm.weight_scaling
    store, hashes, decisions = taken(site, header, len(decided_parts(plan, site.settings)))
    voters = [number for decision in decisions for number in validate(Decision, decision).num_voters]

    def prune_masks(index: int) -> dict[str, torch.Tensor]:
        return unpack_masks(plan.blocks[index], store.get(hashes[block_key(index)]))

    def shares(index: int) -> dict[str, torch.Tensor]:
        return kept_shares(unpack_tensors(store.get(hashes[votes_key(index)])), voters[index])

    return masked_and_scaled(prune_masks, shares) if scaled else masked(prune_masks)


def _own_masks(site: Site, header: Header) -> tuple[BlobStore, list[str]]:
    """What the client would prune alone: kept since it voted, or, if it voted block by block, found out now."""
    state = site.state(header)
    store = state.blobs(header.server_round)
    saved = state.load(header.server_round, "report")
    if saved is None:
        raise Mistake(f"evaluate: this client kept no masks of round {header.server_round}; run the round again")
    saved.pop("settings")
    if site.settings.fedprllm.strategy == "one-shot":
        return store, validate(VoteReport, saved).blob_sha256
    kept = state.load(header.server_round, "activations")
    if kept is None:
        raise Mistake(f"evaluate: this client kept no hidden states of round {header.server_round}; run the round again")
    return store, _prune_alone(site, _kept_windows(store, kept), store)
