"""FedPrLLM at a client (paper: section 3.2, step 1): prune with own text, vote with the mask.

Only the mask is sent; calibration tokens, activations and scores never leave. The client state
keeps what later messages need: masks, for the evaluation or for further parts, and hidden states
between the rounds of iterative pruning.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from client_app.protocol.answer_once import answer_once, is_answered, kept_report
from client_app.protocol.errors import mistakes_of_kernels
from client_app.protocol.evaluation import Evaluation, prepare_evaluation, require_own_text
from client_app.protocol.local_baseline import make_local_baseline, stored_local_baseline
from client_app.protocol.push import taken
from client_app.site import Site
from espalier.data.client_text import client_samples
from espalier.errors import EspalierError, InputError, StateLost
from espalier.hf.stream.block_stream import Activations, BlockStream
from espalier.hf.stream.calibration import choose_in_dense_block, prune_by_block
from espalier.hf.stream.edits import Edits, WeightEdit, masked
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
    job = site.settings.of(FedPrLLMSettings)

    def vote(state: PrivateState) -> Report:
        require_own_text(site, header)
        one_shot = job.strategy == "one-shot"
        return (
            _vote_on_all_blocks(site, state, header)
            if one_shot
            else _vote_on_one_block(site, state, request)
        )

    def require_state(state: PrivateState) -> None:
        number = header.server_round
        if job.strategy == "one-shot" or number == 1 or _left_by(state, number - 1) is not None:
            return
        # With other pushed parts the answer would differ, and each round is answered once.
        if is_answered(state, header):
            raise InputError(
                f"train: this client answered round {number} and lost the state of the one before;"
                " start a new run"
            )
        _delivered_again(site, header)

    return answer_once(site, request, vote, require_ready=require_state)


def _vote_on_all_blocks(site: Site, state: PrivateState, header: Header) -> Report:
    """Prune block by block and store each block's masks immediately (one-shot pruning)."""
    started = time.monotonic()
    samples = client_samples(site.settings, site.node, site.model.encode, header.client)
    hashes = _prune_local_baseline(site, samples, state.blobs(header.server_round))
    return _report(hashes, started)


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
        samples = client_samples(site.settings, site.node, site.model.encode, request.header.client)
        activations = stream.start(samples)
    elif (left := _left_by(state, server_round - 1)) is not None:
        earlier = state.blobs(server_round - 1)
        before = server_round - 2
        samples = _kept_samples(earlier, left)
        with earlier.opened(left["hidden"]) as hidden:
            activations = stream.resume(samples, hidden)
        _walk(
            stream,
            activations,
            range(before, before + 1),
            lambda _: _decided(site, request, before),
        )
    else:
        decided_before = _delivered_again(site, request.header)
        samples = client_samples(site.settings, site.node, site.model.encode, request.header.client)
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
    return _report([store.put(pack_masks(masks))], started)


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


def _decided(site: Site, request: MessageBody, index: int) -> Mapping[str, WeightEdit]:
    """Return the edits of a decided block that the client passes its hidden states through.

    The block is masked, or masked and scaled, as ``continue_behind`` says.
    """
    masks = unpack_masks(site.model.plan.blocks[index], request.blobs[block_key(index)])
    if site.settings.of(FedPrLLMSettings).continue_behind == "masked":
        return masked(lambda _: masks)(index)
    (voters,) = validate(Decision, request.fields).num_voters
    shares = kept_shares(unpack_tensors(request.blobs[votes_key(index)]), voters)
    return masked(lambda _: masks, lambda _: shares)(index)


def _delivered_again(site: Site, header: Header) -> Edits:
    """Return the edits of all blocks decided before a round, as the server pushed them.

    The server pushes them to a client that lost its hidden states.

    Raises
    ------
    StateLost
        The server has not pushed all of them yet.
    """
    number = header.server_round - 1
    parts = decided_parts(site.model.plan, site.settings, number)
    try:
        delivered = taken(site, header, len(parts))
    except EspalierError:
        raise StateLost(f"this client no longer has the hidden states of round {number}") from None
    return _edits(
        site, *delivered, scaled=site.settings.of(FedPrLLMSettings).continue_behind == "scaled"
    )


def _kept_samples(store: BlobStore, kept: dict[str, Any]) -> torch.Tensor:
    return torch.from_numpy(unpack_tensors(store.get(kept["samples"]))[""])


def _prune_local_baseline(site: Site, samples: torch.Tensor, store: BlobStore) -> list[str]:
    """Prune all blocks with this client's calibration samples only.

    Returns
    -------
    list of str
        SHA-256 of each block's masks in the store.
    """
    stream = BlockStream(site.model, site.computing)
    with mistakes_of_kernels():
        pruning = _local_pruning(site)
        pruned = prune_by_block(stream, samples, pruning.prune_mask, watch_for(pruning))
        return [store.put(pack_masks(masks)) for _, masks in pruned]


def _local_pruning(site: Site) -> LocalPruning:
    job = site.settings.of(FedPrLLMSettings)
    return LocalPruning(job.local_metric, job.sparsity, job.local_group)


def _report(hashes: list[str], started: float) -> Report:
    return Report(
        seconds=time.monotonic() - started,
        blob_sha256=hashes,
    )


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
        return {"masks": _prune_local_baseline(site, _kept_samples(store, kept), store)}

    return make_local_baseline(site, request, make)


def evaluate(site: Site, request: MessageBody) -> Evaluation:
    """Prepare to evaluate the client's own pruned model, and all models on its own text."""
    store, hashes = _own_masks(site, request.header)
    alone = masked(
        lambda index: unpack_masks(site.model.plan.blocks[index], store.get(hashes[index]))
    )
    return prepare_evaluation(site, request, alone, lambda: _federated(site, request.header))


def _federated(site: Site, header: Header) -> Edits:
    """Return the edits of the federated result, as the server pushed it."""
    delivered = taken(
        site,
        header,
        len(decided_parts(site.model.plan, site.settings, len(site.model.plan.blocks))),
    )
    return _edits(site, *delivered, scaled=site.settings.of(FedPrLLMSettings).weight_scaling)


def _edits(
    site: Site,
    store: BlobStore,
    hashes: dict[str, str],
    decisions: Sequence[Mapping[str, object]],
    *,
    scaled: bool,
) -> Edits:
    """Return the edits of those blocks of the federated model that the server pushed."""
    voters = [
        number for decision in decisions for number in validate(Decision, decision).num_voters
    ]

    def prune_masks(index: int) -> dict[str, torch.Tensor]:
        return unpack_masks(site.model.plan.blocks[index], store.get(hashes[block_key(index)]))

    def shares(index: int) -> dict[str, torch.Tensor]:
        return kept_shares(unpack_tensors(store.get(hashes[votes_key(index)])), voters[index])

    return masked(prune_masks, shares if scaled else None)


def _own_masks(site: Site, header: Header) -> tuple[BlobStore, list[str]]:
    """Return the masks of the local baseline.

    One-shot pruning stored them when the client voted, iterative pruning in the ``alone`` request.
    """
    state = site.state(header)
    store = state.blobs(header.server_round)
    if site.settings.of(FedPrLLMSettings).strategy == "iterative":
        return store, stored_local_baseline(site, header)["masks"]
    return store, validate(Report, kept_report(site, header, "masks")["report"]).blob_sha256
