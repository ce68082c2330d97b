"""FedSODA at a client: tune the adapter's LoRA on the sub-model, with frozen emulator LoRA."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from client_app.methods.tuning import adapter_averaging
from client_app.protocol.evaluation import Evaluation
from client_app.protocol.model_download import offered_sha256, take_offer, take_piece
from client_app.protocol.push import store_part
from client_app.site import Site, reply_to
from espalier.errors import EspalierError, StateLost
from espalier.hf.opening.base_check import require_within_limits
from espalier.messages.blobs.adapters import sums, unpack_adapters
from espalier.messages.message import MessageBody, NoFields, validate
from espalier.methods.tuning.fedsoda import (
    NEVER,
    EmulatorPart,
    FedSodaSettings,
    SubModelOrder,
    emulator_adapters,
)
from espalier.models.adapters import AdapterPlan, Tensors
from espalier.storage.client_state import PrivateState
from espalier.training.initial_values import initial_values

EMULATOR = "emulator"
"""Name of a document that outlives rounds: the last two alignments.

Each entry has the blocks with LoRA, and the hashes of the blobs by part and key.
"""

LAST = "last-alignment"
"""Name of a document that outlives rounds: the number of the last alignment received.

It is kept apart from the alignments, so that a missing alignment is noticed.
"""


def answer_push(site: Site, request: MessageBody) -> MessageBody:
    """Answer a ``push`` for the sub-model, for its emulator's LoRA, or for the adapters."""
    what = request.fields.get("what")
    if what == "model":
        return take_offer(site, request)
    if what == "piece":
        return take_piece(site, request)
    return _take_emulator(site, request) if what == "emulator" else store_part(site, request)


def _take_emulator(site: Site, request: MessageBody) -> MessageBody:
    """Store a part of the emulator's LoRA, and keep the previous alignment.

    An order of the previous round may be sent again and then needs the previous alignment.
    """
    state = site.state(request.header)
    part = validate(EmulatorPart, request.fields)
    # The previous alignment stays: an order that names it may be repeated.
    with state.locked():
        kept = _kept(state)
        store = state.blobs_of(EMULATOR)
        # A part of another alignment begins a new entry; only the last two entries are kept.
        # The same alignment arrives in several parts.
        if not kept or (kept[-1]["aligned"], kept[-1]["blocks"]) != (part.aligned, part.blocks):
            kept = [*kept[-1:], {"aligned": part.aligned, "blocks": part.blocks, "parts": {}}]
        kept[-1]["parts"][str(request.header.part)] = {
            key: store.put(blob) for key, blob in request.blobs.items()
        }
        state.save_lasting(EMULATOR, {"kept": kept})
        # Separate from the blobs: a site that lost them must not take an older alignment for the
        # last.
        state.save_lasting(LAST, {"aligned": part.aligned})
        # Blobs of older alignments are deleted.
        store.keep_only(
            {
                blob
                for stored in kept
                for hashes in stored["parts"].values()
                for blob in hashes.values()
            }
        )
    return reply_to(request, NoFields())


@dataclass(frozen=True)
class StoredEmulator:
    """Emulator LoRA that is stored at this client."""

    blocks: list[int]
    """Blocks of the sub-model with emulator LoRA; empty if it was never aligned."""
    hashes: dict[str, str]
    """SHA-256 of its blobs, by key."""

    def blobs(self, state: PrivateState) -> dict[str, bytes]:
        """Return the blobs by key; StateLost if one is missing or damaged."""
        store = state.blobs_of(EMULATOR)
        try:
            return {key: store.get(blob) for key, blob in self.hashes.items()}
        except EspalierError as error:
            raise StateLost(f"train: the emulator's LoRA at this site: {error}") from None


def stored_emulator(state: PrivateState, aligned: int | None = None) -> StoredEmulator:
    """Return the stored emulator LoRA of an alignment; None means the last one.

    Raises StateLost if that alignment was not received here.
    """
    kept = _kept(state)
    if aligned is None:
        # The last one that was announced.
        aligned = (state.load_lasting(LAST) or {"aligned": NEVER})["aligned"]
    if aligned == NEVER:
        return StoredEmulator([], {})
    emulator = next((stored for stored in kept if stored["aligned"] == aligned), None)
    if emulator is None:
        raise StateLost("train: the site has the emulator's LoRA of a different round")
    return StoredEmulator(
        emulator["blocks"],
        {key: blob for part in emulator["parts"].values() for key, blob in part.items()},
    )


def _kept(state: PrivateState) -> list[dict[str, Any]]:
    kept: list[dict[str, Any]] = (state.load_lasting(EMULATOR) or {"kept": []})["kept"]
    return kept


def require_model(state: PrivateState, order: SubModelOrder) -> None:
    """Raise StateLost unless the sub-model that an order names was received here."""
    # The hash of the folder covers all files.
    if offered_sha256(state) != order.model_sha256:
        raise StateLost(
            "train: the run's sub-model was not sent to this site, or its state was removed"
        )


def train(site: Site, request: MessageBody) -> MessageBody:
    """Train the adapter's LoRA and reply with the first part. Each round is answered once."""
    order = validate(SubModelOrder, request.fields)
    state = site.state(request.header)
    require_model(state, order)
    return adapter_averaging.train(
        site, request, _additions(site, state, stored_emulator(state, order.aligned))
    )


def local_baseline(site: Site, request: MessageBody) -> MessageBody:
    """Compute the local baseline: train the adapter's LoRA on the sub-model without the others."""
    state = site.state(request.header)
    return adapter_averaging.local_baseline(
        site, request, _additions(site, state, stored_emulator(state))
    )


def evaluate(site: Site, request: MessageBody) -> Evaluation:
    """Prepare to evaluate the sub-model with the local baseline and with the federated adapter."""
    state = site.state(request.header)
    return adapter_averaging.evaluate(
        site, request, _additions(site, state, stored_emulator(state))
    )


def _additions(
    site: Site, state: PrivateState, stored: StoredEmulator
) -> adapter_averaging.Additions:
    """Return the emulator's frozen LoRA, and the penalty on the distance to the first values."""
    require_within_limits(site.settings, site.model)
    plan, values = _emulator(site, state, stored)
    penalty = (
        _Pull(site)
        if site.settings.of(FedSodaSettings).pulls_to_first(site.settings.training)
        else None
    )
    return adapter_averaging.Additions(plan, values, stored.hashes, penalty)


def _emulator(
    site: Site, state: PrivateState, stored: StoredEmulator
) -> tuple[AdapterPlan | None, Tensors]:
    if not stored.blocks:
        return None, {}
    settings = site.settings
    blobs = stored.blobs(state)
    plan = emulator_adapters(site.model.plan, settings, stored.blocks)
    # A part may be missing if the push was interrupted.
    if missing := sorted(plan.shapes().keys() - blobs.keys()):
        raise StateLost(
            f"train: of the emulator's LoRA {', '.join(missing)} was not sent to this site"
        )
    tensors = {
        key: unpack_adapters(shapes, blobs[key], settings.federation.wire_dtype)
        for key, shapes in plan.shapes().items()
    }
    # Differences are relative to the initial values, which the seed determines.
    if not settings.of(FedSodaSettings).pushes_differences(settings.federation):
        return plan, tensors
    first = initial_values(site.model, plan, settings.seed)
    return plan, {key: sums(first[key], block) for key, block in tensors.items()}


class _Pull:
    """FedBiOT's regularizer: squared distance of the trained values to their first values."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._first = dict[str, dict[str, Tensor]]()

    def __call__(self, adapters: AdapterPlan, values: Tensors) -> Tensor:
        """Return ``mu / 2 * ||w - w_first||^2``, a float32 scalar."""
        # The first values follow from the seed and are made at the first call only.
        if not self._first:
            made = initial_values(self._site.model, adapters, self._site.settings.seed)
            self._first = {
                key: {name: made[key][name].to(value.device) for name, value in block.items()}
                for key, block in values.items()
            }
        # On the device of the trained values, to avoid a copy in every step.
        squares = [
            (value - self._first[key][name]).square().sum()
            for key, block in values.items()
            for name, value in block.items()
        ]
        return self._site.settings.training.proximal / 2 * torch.stack(squares).sum()
