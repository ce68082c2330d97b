"""FedPrLLM at a client (paper: section 3.2, step 1): prune with own text, vote with the mask.

Only the mask is sent; calibration tokens, activations and scores never leave. The client state
keeps what later messages need: masks, for the evaluation or for further parts, and hidden states
between the rounds of iterative pruning.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from client_app.protocol.answer_once import answer_once, is_answered, kept_report
from client_app.protocol.calibration import answer_from_samples, samples_of
from client_app.protocol.errors import mistakes_of_kernels
from client_app.protocol.evaluation import Evaluation, prepare_evaluation, require_own_text
from client_app.protocol.local_baseline import make_local_baseline, stored_local_baseline
from client_app.protocol.push import taken
from client_app.site import Site
from espalier.errors import EspalierError, InputError, StateLost
from espalier.hf.stream.block_stream import Activations, BlockStream
from espalier.hf.stream.calibration import choose_in_dense_block, prune_by_block
from espalier.hf.stream.edits import Edits, masked
from espalier.hf.stream.input_statistics import watch_for
from espalier.messages.blobs.mask_tensors import kept_shares, pack_masks, unpack_masks
from espalier.messages.message import Header, MessageBody, validate
from espalier.messages.parts import Report
from espalier.messages.tensor_blobs import pack_tensors, unpack_tensors
from espalier.methods.fedprllm import Decision, FedPrLLMSettings, decided_parts, votes_key
from espalier.models.plan import block_key
from espalier.progress import beat
from espalier.storage.blobs import BlobStore
from espalier.storage.client_state import PrivateState
from pruning_kernels.selection.local import LocalPruning


def train(site: Site, request: MessageBody) -> MessageBody:
    """Prune locally and reply with the first part of the masks. Each round is answered once."""
    header = request.header
    if site.settings.of(FedPrLLMSettings).strategy == "one-shot":
        return answer_from_samples(site, request, lambda samples: _own_masks(site, samples))

    def vote(state: PrivateState) -> Report:
        require_own_text(site, header)
        return _vote_on_one_block(site, state, request)

    def require_state(state: PrivateState) -> None:
        number = header.server_round
        if number == 1 or _left_by(state, number - 1) is not None:
            return
        # With other pushed parts the answer would differ, and each round is answered once.
        if is_answered(state, header):
            raise InputError(
                f"train: this client answered round {number} and lost the state of the one before;"
                " start a new run"
            )
        _delivered_again(site, header)

    return answer_once(site, request, vote, require_ready=require_state)


def _vote_on_one_block(site: Site, state: PrivateState, request: MessageBody) -> Report:
    """Vote on the next block of iterative pruning (section 3.2.3).

    The client applies the server's decision to the previous block, passes its hidden states through
    that block, and prunes the next one. The hidden states before the round's block stay in the
    client state, and the next round starts from them. A client that lost them starts from the
    beginning and passes through all decided blocks, once the server has pushed those.
    """
    started = time.monotonic()
    server_round = request.header.server_round
    stream = BlockStream(site.model, site.computing)
    store = state.blobs(server_round)
    if server_round == 1:
        samples = samples_of(site, request.header)
        activations = stream.start(samples)
    elif (left := _left_by(state, server_round - 1)) is not None:
        earlier = state.blobs(server_round - 1)
        before = server_round - 2
        samples = _kept_samples(earlier, left)
        with earlier.opened(left["hidden"]) as hidden:
            activations = stream.resume(samples, hidden)
        decided = range(before, server_round - 1)
        voters = dict.fromkeys(decided, request.fields.get("num_voters", [0])[0])
        edits = _edits(site, request.blobs.__getitem__, voters, scaled=_continues_scaled(site))
        _walk(stream, activations, decided, edits)
    else:
        decided_before = _delivered_again(site, request.header)
        samples = samples_of(site, request.header)
        activations = stream.start(samples)
        _walk(stream, activations, range(server_round - 1), decided_before)
    kept = {
        "samples": store.put(pack_tensors({"": samples.numpy()})),
        "hidden": store.put_pieces(activations.pieces()),
    }
    state.save(server_round, "activations", kept)
    beat(f"pruning block {server_round} of {len(site.model.plan.blocks)}")
    with mistakes_of_kernels():
        pruning = _local_pruning(site)
        masks = choose_in_dense_block(
            stream, activations, server_round - 1, pruning.prune_mask, watch_for(pruning)
        )
    hashes = [store.put(pack_masks(masks))]
    return Report(seconds=time.monotonic() - started, blob_sha256=hashes)


def _left_by(state: PrivateState, server_round: int) -> dict[str, Any] | None:
    """Return the document that a round left for the next one; None if it is missing or damaged."""
    store = state.blobs(server_round)
    try:
        left = state.load(server_round, "activations")
    except EspalierError:
        return None
    return (
        left if left is not None and all(store.is_whole(blob) for blob in left.values()) else None
    )


@torch.no_grad()
def _walk(stream: BlockStream, activations: Activations, blocks: range, edits: Edits) -> None:
    """Pass the activations through blocks whose masks are decided."""
    for index in blocks:
        beat(f"passing block {index + 1} of {len(stream.model.plan.blocks)}")
        with stream.block(index, edits(index), index + 1) as block:
            activations.through(index, block)


def _delivered_again(site: Site, header: Header) -> Edits:
    """Return the edits of all blocks decided before a round; StateLost until they are pushed."""
    number = header.server_round - 1
    try:
        return _pushed(site, header, number, scaled=_continues_scaled(site))
    except EspalierError:
        raise StateLost(f"this client no longer has the hidden states of round {number}") from None


def _continues_scaled(site: Site) -> bool:
    """Return True if clients pass their hidden states through scaled blocks, not only masked."""
    return site.settings.of(FedPrLLMSettings).continue_behind == "scaled"


def _kept_samples(store: BlobStore, kept: dict[str, Any]) -> torch.Tensor:
    return torch.from_numpy(unpack_tensors(store.get(kept["samples"]))[""])


def _own_masks(site: Site, samples: torch.Tensor) -> Iterator[bytes]:
    """Prune all blocks with this client's samples only, and yield each block's masks."""
    stream = BlockStream(site.model, site.computing)
    with mistakes_of_kernels():
        pruning = _local_pruning(site)
        for _, masks in prune_by_block(stream, samples, pruning.prune_mask, watch_for(pruning)):
            yield pack_masks(masks)


def _local_pruning(site: Site) -> LocalPruning:
    job = site.settings.of(FedPrLLMSettings)
    return LocalPruning(job.local_metric, job.sparsity, job.local_group)


def alone(site: Site, request: MessageBody) -> MessageBody:
    """Compute the local baseline: prune without the other clients' decisions.

    The rounds of iterative pruning do not leave one. The masks stay at this client.
    """

    def make(state: PrivateState) -> dict[str, Any]:
        server_round = request.header.server_round
        kept = state.load(server_round, "activations")
        if kept is None:
            raise InputError(
                f"alone: this client kept no hidden states of round {server_round}; run the round"
                " again"
            )
        store = state.blobs(server_round)
        return {"masks": list(map(store.put, _own_masks(site, _kept_samples(store, kept))))}

    return make_local_baseline(site, request, make)


def evaluate(site: Site, request: MessageBody) -> Evaluation:
    """Prepare to evaluate the client's own pruned model, and all models on its own text."""
    store, hashes = _stored_masks(site, request.header)
    alone = masked(
        lambda index: unpack_masks(site.model.plan.blocks[index], store.get(hashes[index]))
    )
    blocks = len(site.model.plan.blocks)
    scaled = site.settings.of(FedPrLLMSettings).weight_scaling
    return prepare_evaluation(
        site, request, alone, lambda: _pushed(site, request.header, blocks, scaled=scaled)
    )


def _pushed(site: Site, header: Header, decided: int, *, scaled: bool) -> Edits:
    """Return the edits of the first ``decided`` blocks, as the server pushed them."""
    parts = decided_parts(site.model.plan, site.settings, decided)
    store, hashes, decisions = taken(site, header, len(parts))
    voters = [number for one in decisions for number in validate(Decision, one).num_voters]
    return _edits(site, lambda key: store.get(hashes[key]), dict(enumerate(voters)), scaled=scaled)


def _edits(
    site: Site, blob: Callable[[str], bytes], voters: Mapping[int, int], *, scaled: bool
) -> Edits:
    """Return the edits by the decisions in some blobs: masks and, if ``scaled``, votes."""

    def prune_masks(index: int) -> dict[str, torch.Tensor]:
        return unpack_masks(site.model.plan.blocks[index], blob(block_key(index)))

    def shares(index: int) -> dict[str, torch.Tensor]:
        return kept_shares(unpack_tensors(blob(votes_key(index))), voters[index])

    return masked(prune_masks, shares if scaled else None)


def _stored_masks(site: Site, header: Header) -> tuple[BlobStore, list[str]]:
    """Return the masks of the local baseline, from the vote or the ``alone`` request."""
    state = site.state(header)
    store = state.blobs(header.server_round)
    if site.settings.of(FedPrLLMSettings).strategy == "iterative":
        return store, stored_local_baseline(site, header)["masks"]
    return store, kept_report(site, header, "masks")["report"]["blob_sha256"]
