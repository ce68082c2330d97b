"""Rounds that decide one block each: a client continues behind the blocks that are decided.

The hidden states before the round's block stay in the client state, and the next round starts from
them. A client that lost them starts from the beginning and passes through all decided blocks, once
the server has pushed those.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from client_app.protocol.answer_once import answer_once, is_answered
from client_app.protocol.calibration import samples_of
from client_app.protocol.evaluation import require_own_text
from client_app.protocol.local_baseline import make_local_baseline
from client_app.site import Site
from espalier.errors import EspalierError, InputError, StateLost
from espalier.hf.stream.block_stream import Activations, BlockStream
from espalier.hf.stream.edits import Edits
from espalier.messages.message import MessageBody
from espalier.messages.parts import Report
from espalier.messages.tensor_blobs import pack_tensors, unpack_tensors
from espalier.progress import report_progress
from espalier.storage.blobs import BlobStore, sha256
from espalier.storage.client_state import PrivateState

DECIDED = "decided"
"""Name of a lasting document: by round, the hash of each decision that its request brought.

Under round 1, which brings none, are those that the server pushed after the document was lost.
"""
Work = Callable[[BlockStream, Activations, int], Iterable[bytes]]
"""Function of the stream, the hidden states before a block, and its index: the reply's blobs."""


@dataclass(frozen=True)
class Decisions:
    """Decisions about some blocks."""

    edits: Edits
    hashes: Mapping[str, str]
    """SHA-256 of each of their blobs, and other values that the edits rest on, by key."""


def decisions_in(request: MessageBody, edits: Edits) -> Decisions:
    """Return the decisions that a request brings."""
    return Decisions(edits, {key: sha256(blob) for key, blob in request.blobs.items()})


@dataclass(frozen=True)
class NextBlock:
    """Request for the next block of iterative pruning (FedPrLLM, section 3.2.3)."""

    site: Site
    request: MessageBody
    decided: Decisions
    """Decision about the block before, by the blobs of this request."""
    pushed: Callable[[int], Decisions]
    """Function of a number of blocks: decisions about the first blocks, as the server pushed them.

    It raises EspalierError if the server has not.
    """

    def answer(self, work: Work) -> MessageBody:
        """Answer with the blobs of ``work`` on the round's block. Each round is answered once."""
        header = self.request.header
        before = dict[str, str]()

        def rests_on(state: PrivateState) -> dict[str, str]:
            before.update(self._decided_before(state))
            return before

        def reply(state: PrivateState) -> Report:
            require_own_text(self.site, header)
            started = time.monotonic()
            stream, activations = self._before_block(state, before)
            index = header.server_round - 1
            store = state.blobs(header.server_round)
            # The block's blobs, as they are made.
            hashes = [store.put(blob) for blob in work(stream, activations, index)]
            return Report(seconds=time.monotonic() - started, blob_sha256=hashes)

        # An order behind other decisions is another request.
        return answer_once(
            self.site, self.request, reply, rests_on, require_ready=self._require_state
        )

    def _decided_before(self, state: PrivateState) -> dict[str, str]:
        """Return the hashes of all decisions before that of the request."""
        header = self.request.header
        known: dict[str, dict[str, str]] = state.load_lasting(DECIDED) or {}
        # Rounds 1 and 2 rest on nothing but their requests.
        if not known and header.server_round > 2 and not is_answered(state, header):
            pushed = self._pushed_again().hashes
            before = {key: pushed[key] for key in pushed.keys() - self.decided.hashes.keys()}
            # Kept before the order counts as begun, so that its repetition is the same request.
            known = {"1": before}
            state.save_lasting(DECIDED, known)
        earlier = (known[number] for number in known if int(number) < header.server_round)
        return {key: digest for hashes in earlier for key, digest in hashes.items()}

    def _note_decided(self, state: PrivateState) -> None:
        """Keep the hashes of the request's decision."""
        known = state.load_lasting(DECIDED) or {}
        number = str(self.request.header.server_round)
        state.save_lasting(DECIDED, known | {number: dict(self.decided.hashes)})

    def _require_state(self, state: PrivateState) -> None:
        """Raise StateLost if the hidden states are lost and the decisions were not pushed."""
        header = self.request.header
        number = header.server_round
        # Round 1 starts from the samples.
        if number == 1 or _state_of_round(state, number - 1) is not None:
            return
        # With other pushed parts the answer would differ, and each round is answered once.
        if is_answered(state, header):
            raise InputError(
                f"train: this client answered round {number} and lost the state of the one before;"
                " start a new run"
            )
        self._pushed_again()

    def _before_block(
        self, state: PrivateState, decided_before: Mapping[str, str]
    ) -> tuple[BlockStream, Activations]:
        """Return the hidden states before the round's block, and keep them for the next round."""
        header = self.request.header
        before = header.server_round - 2
        stream = BlockStream(self.site.model, self.site.computing)
        # 1. The first block: start with the samples.
        if before < 0:
            samples = samples_of(self.site, header)
            activations = stream.start(samples)
        elif (left := _state_of_round(state, header.server_round - 1)) is not None:
            # 2. Usually: go on with the hidden states that the last round left, through its block.
            earlier = state.blobs(header.server_round - 1)
            samples = _samples(earlier, left)
            with earlier.opened(left["hidden"]) as hidden:
                activations = stream.resume(samples, hidden)
            _walk(stream, activations, range(before, before + 1), self.decided.edits)
        else:
            # 3. The states are lost: start again, and pass through all decided blocks.
            pushed = self._pushed_again()
            if pushed.hashes != {**decided_before, **self.decided.hashes}:
                raise InputError(
                    "train: the server pushed other decisions about the blocks before than those"
                    " that this client went on behind; start a new run"
                )
            samples = samples_of(self.site, header)
            activations = stream.start(samples)
            _walk(stream, activations, range(before + 1), pushed.edits)
        self._note_decided(state)
        # Kept for the next round, and for a repetition of this one.
        store = state.blobs(header.server_round)
        kept = {
            "samples": store.put(pack_tensors({"": samples.numpy()})),
            "hidden": store.put_pieces(activations.pieces()),
        }
        state.save(header.server_round, "activations", kept)
        return stream, activations

    def _pushed_again(self) -> Decisions:
        """Return decisions about all blocks before a round's; StateLost until they are pushed."""
        number = self.request.header.server_round - 1
        try:
            return self.pushed(number)
        except EspalierError:
            raise StateLost(
                f"this client no longer has the hidden states of round {number}"
            ) from None


def make_own_masks(
    site: Site, request: MessageBody, masks: Callable[[Tensor], Iterable[bytes]]
) -> MessageBody:
    """Answer a ``local_baseline``: prune without the other clients' decisions.

    The rounds of iterative pruning leave no local baseline. ``masks`` is a function of the samples
    of the rounds that returns each block's masks, which stay at this client.
    """

    def make(state: PrivateState) -> dict[str, Any]:
        server_round = request.header.server_round
        # The same samples as in the rounds.
        kept = state.load(server_round, "activations")
        if kept is None:
            raise InputError(
                f"local_baseline: this client kept no hidden states of round {server_round}; run"
                " the round again"
            )
        store = state.blobs(server_round)
        return {"masks": list(map(store.put, masks(_samples(store, kept))))}

    return make_local_baseline(site, request, make)


def _state_of_round(state: PrivateState, server_round: int) -> dict[str, Any] | None:
    """Return the document that a round left for the next one; None if it is missing or damaged."""
    store = state.blobs(server_round)
    # A damaged document counts as missing.
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
        report_progress(f"passing block {index + 1} of {len(stream.model.plan.blocks)}")
        # The block is loaded with its edits, and freed after it.
        with stream.block(index, edits(index), index + 1) as block:
            activations.through(index, block)


def _samples(store: BlobStore, kept: dict[str, Any]) -> Tensor:
    return torch.from_numpy(unpack_tensors(store.get(kept["samples"]))[""])
