"""FedPrLLM at a client (paper: section 3.2, step 1): prune with own text, vote with the mask.

Only the mask is sent; calibration tokens, activations and scores never leave. The client state
keeps what later messages need: masks, for the evaluation or for further parts, and hidden states
between the rounds of iterative pruning.
"""

from collections.abc import Callable, Iterator, Mapping

import torch

from client_app.protocol.answer_once import stored_reply
from client_app.protocol.calibration import answer_from_samples
from client_app.protocol.decided_blocks import Decisions, NextBlock, make_own_masks
from client_app.protocol.errors import kernel_errors
from client_app.protocol.evaluation import Evaluation, prepare_evaluation
from client_app.protocol.local_baseline import stored_local_baseline
from client_app.protocol.push import pushed_parts
from client_app.site import Site
from espalier.hf.stream.block_stream import Activations, BlockStream
from espalier.hf.stream.calibration import choose_in_dense_block, prune_by_block
from espalier.hf.stream.edits import masked
from espalier.hf.stream.input_statistics import watch_for
from espalier.messages.blobs.mask_tensors import kept_shares, pack_masks, unpack_masks
from espalier.messages.message import Header, MessageBody, validate
from espalier.messages.tensor_blobs import unpack_tensors
from espalier.methods.pruning.fedprllm import (
    VOTES,
    Decision,
    FedPrLLMSettings,
    decided_parts,
    votes_key,
)
from espalier.models.plan import block_key
from espalier.progress import report_progress
from espalier.storage.blobs import BlobStore, sha256
from pruning_kernels.selection.local_pruning import LocalPruning


def train(site: Site, request: MessageBody) -> MessageBody:
    """Prune locally and reply with the first part of the masks. Each round is answered once."""
    if site.settings.of(FedPrLLMSettings).strategy == "one-shot":
        return answer_from_samples(site, request, lambda samples: _own_masks(site, samples))
    pruning = _local_pruning(site)
    scaled = _continues_scaled(site)

    # Block by block, only the block before is decided with this request.
    before = request.header.server_round - 2
    voters = {before: request.fields["num_voters"][0]} if scaled and before >= 0 else {}
    hashes = {key: sha256(blob) for key, blob in request.blobs.items()}
    decided = _decisions(site, request.blobs.__getitem__, hashes, voters, scaled=scaled)

    def vote(stream: BlockStream, activations: Activations, index: int) -> Iterator[bytes]:
        report_progress(f"pruning block {index + 1} of {len(site.model.plan.blocks)}")
        # Errors of kernels contain no data, so their text may leave.
        with kernel_errors():
            masks = choose_in_dense_block(
                stream, activations, index, pruning.prune_mask, watch_for(pruning)
            )
        yield pack_masks(masks)

    return NextBlock(
        site,
        request,
        decided,
        lambda number: _pushed(site, request.header, number, scaled=scaled),
    ).answer(vote)


def _continues_scaled(site: Site) -> bool:
    """Return True if clients pass their hidden states through scaled blocks, not only masked."""
    return site.settings.of(FedPrLLMSettings).continue_behind == "scaled"


def _own_masks(site: Site, samples: torch.Tensor) -> Iterator[bytes]:
    """Prune all blocks with this client's samples only, and yield each block's masks."""
    # One block in memory at a time.
    stream = BlockStream(site.model, site.computing)
    with kernel_errors():
        pruning = _local_pruning(site)
        for _, masks in prune_by_block(stream, samples, pruning.prune_mask, watch_for(pruning)):
            yield pack_masks(masks)


def _local_pruning(site: Site) -> LocalPruning:
    job = site.settings.of(FedPrLLMSettings)
    return LocalPruning(job.metric, job.sparsity, job.local_group)


def local_baseline(site: Site, request: MessageBody) -> MessageBody:
    """Compute the local baseline of iterative pruning (``decided_blocks.make_own_masks``)."""
    return make_own_masks(site, request, lambda samples: _own_masks(site, samples))


def evaluate(site: Site, request: MessageBody) -> Evaluation:
    """Prepare to evaluate the client's own pruned model, and all models on its own text."""
    store, hashes = _stored_masks(site, request.header)
    alone = masked(
        lambda index: unpack_masks(site.model.plan.blocks[index], store.get(hashes[index]))
    )
    blocks = len(site.model.plan.blocks)
    # Votes are stored only with weight scaling.
    scaled = site.settings.of(FedPrLLMSettings).weight_scaling
    return prepare_evaluation(
        site, request, alone, lambda: _pushed(site, request.header, blocks, scaled=scaled).edits
    )


def _pushed(site: Site, header: Header, decided: int, *, scaled: bool) -> Decisions:
    """Return the decisions about the first ``decided`` blocks, as the server pushed them."""
    parts = decided_parts(site.model.plan, site.settings, decided)
    store, hashes, decisions = pushed_parts(site, header, len(parts))
    voters = [number for fields in decisions for number in validate(Decision, fields).num_voters]
    by_block = dict(enumerate(voters))
    return _decisions(site, lambda key: store.get(hashes[key]), hashes, by_block, scaled=scaled)


def _decisions(
    site: Site,
    blob: Callable[[str], bytes],
    hashes: Mapping[str, str],
    voters: Mapping[int, int],
    *,
    scaled: bool,
) -> Decisions:
    """Return the decisions in some blobs: masks and, if ``scaled``, votes and their numbers."""

    def prune_masks(index: int) -> dict[str, torch.Tensor]:
        return unpack_masks(site.model.plan.blocks[index], blob(block_key(index)))

    def shares(index: int) -> dict[str, torch.Tensor]:
        return kept_shares(unpack_tensors(blob(votes_key(index))), voters[index])

    # Votes may be there for the evaluation only.
    used = {key: found for key, found in hashes.items() if scaled or not key.startswith(VOTES)}
    if scaled:
        used |= {f"voters-{index:04d}": str(number) for index, number in voters.items()}
    return Decisions(masked(prune_masks, shares if scaled else None), used)


def _stored_masks(site: Site, header: Header) -> tuple[BlobStore, list[str]]:
    """Return the masks of the local baseline, from the vote or the ``local_baseline`` request."""
    state = site.state(header)
    store = state.blobs(header.server_round)
    # Iterative rounds leave no own masks; the ``local_baseline`` request made them.
    if site.settings.of(FedPrLLMSettings).strategy == "iterative":
        return store, stored_local_baseline(site, header)["masks"]
    return store, stored_reply(site, header, "masks")["report"]["blob_sha256"]
