"""Pooled pruning at a client: sums of squared inputs, in fixed point.

Only the sums and a count are sent; samples and activations never leave. One-shot pruning takes them
in the dense model. Iterative pruning takes those of one block per round, behind the blocks that the
server pruned. The local baseline has the masks that follow from the client's own sums.
"""

from collections.abc import Callable, Iterator

from torch import Tensor

from client_app.protocol.answer_once import stored_reply
from client_app.protocol.calibration import answer_from_samples
from client_app.protocol.decided_blocks import (
    Decisions,
    NextBlock,
    decisions_in,
    make_own_masks,
)
from client_app.protocol.errors import kernel_errors
from client_app.protocol.evaluation import Evaluation, prepare_evaluation
from client_app.protocol.local_baseline import stored_local_baseline
from client_app.protocol.push import pushed_parts
from client_app.site import Site
from espalier.hf.stream.block_stream import Activations, BlockStream
from espalier.hf.stream.edits import Edits, masked
from espalier.hf.stream.pooled_sums import (
    dense_sums,
    masks_by_sums,
    pack_sums,
    pooled_masks,
    sums_in_block,
    unpack_sums,
)
from espalier.messages.blobs.mask_tensors import pack_masks, unpack_masks
from espalier.messages.message import Header, MessageBody
from espalier.methods.pruning.pooled_pruning import PooledPruningSettings, decided_parts
from espalier.models.plan import block_key
from espalier.progress import report_progress
from espalier.storage.blobs import BlobStore


def train(site: Site, request: MessageBody) -> MessageBody:
    """Reply with the first part of the sums. Each round is answered once."""
    if site.settings.privacy.on:
        from client_app.methods.private import sums as private_sums

        return private_sums.train(site, request)
    job = site.settings.of(PooledPruningSettings)

    def all_blocks(samples: Tensor) -> Iterator[bytes]:
        stream = BlockStream(site.model, site.computing)
        # Dense inputs: all blocks in one pass.
        for index, sums in enumerate(dense_sums(stream, samples)):
            yield pack_sums(stream, index, sums, samples.numel(), job)

    def one_block(stream: BlockStream, activations: Activations, index: int) -> Iterator[bytes]:
        report_progress(f"watching block {index + 1} of {len(site.model.plan.blocks)}")
        sums = sums_in_block(stream, activations, index)
        yield pack_sums(stream, index, sums, activations.num_tokens, job)

    # Iterative pruning decides block by block.
    if job.strategy == "one-shot":
        return answer_from_samples(site, request, all_blocks)
    return NextBlock(
        site,
        request,
        decisions_in(request, _edits(site, request.blobs.__getitem__)),
        lambda number: _pushed(site, request.header, number),
    ).answer(one_block)


def local_baseline(site: Site, request: MessageBody) -> MessageBody:
    """Compute the local baseline of iterative pruning (``decided_blocks.make_own_masks``)."""

    def masks(samples: Tensor) -> Iterator[bytes]:
        job = site.settings.of(PooledPruningSettings)
        stream = BlockStream(site.model, site.computing)
        with kernel_errors():
            yield from map(pack_masks, pooled_masks(stream, [samples], job))

    return make_own_masks(site, request, masks)


def evaluate(site: Site, request: MessageBody) -> Evaluation:
    """Prepare to evaluate the local baseline, and all models on the client's own text."""
    store, hashes = _own_masks(site, request.header)
    local_edits = _edits(site, lambda key: store.get(hashes[key]))
    blocks = len(site.model.plan.blocks)
    return prepare_evaluation(
        site, request, local_edits, lambda: _pushed(site, request.header, blocks).edits
    )


def _own_masks(site: Site, header: Header) -> tuple[BlobStore, dict[str, str]]:
    """Return the masks of the local baseline, from its request or the client's sums."""
    keys = [block_key(block.index) for block in site.model.plan.blocks]
    store = site.state(header).blobs(header.server_round)
    job = site.settings.of(PooledPruningSettings)
    if job.strategy == "iterative":
        return store, dict(zip(keys, stored_local_baseline(site, header)["masks"], strict=True))
    # Masks follow from the sums that were sent, so nothing is measured again.
    hashes = []
    sent = stored_reply(site, header, "sums")["report"]["blob_sha256"]
    with kernel_errors():
        for block, blob in zip(site.model.plan.blocks, sent, strict=True):
            sums = unpack_sums(block, store.get(blob), job)
            masks = masks_by_sums(site.model, block, sums, job, site.computing.device)
            hashes.append(store.put(pack_masks(masks)))
    return store, dict(zip(keys, hashes, strict=True))


def _pushed(site: Site, header: Header, decided: int) -> Decisions:
    """Return the decisions about the first ``decided`` blocks, as the server pushed them."""
    parts = decided_parts(site.model.plan, site.settings, decided)
    store, hashes, _ = pushed_parts(site, header, len(parts))
    return Decisions(_edits(site, lambda key: store.get(hashes[key])), hashes)


def _edits(site: Site, blob: Callable[[str], bytes]) -> Edits:
    """Return the edits by the masks in some blobs."""
    blocks = site.model.plan.blocks
    return masked(lambda index: unpack_masks(blocks[index], blob(block_key(index))))
