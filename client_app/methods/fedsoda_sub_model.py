"""FedSODA's sub-model at a client: its files, and the aligned LoRA of its emulator."""

from dataclasses import dataclass
from typing import Any

from client_app.protocol.model_download import offered_sha256, take_offer, take_piece
from client_app.protocol.push import take
from client_app.site import Site, reply_to
from espalier.errors import EspalierError, StateLost
from espalier.messages.message import MessageBody, NoFields, validate
from espalier.methods.fedsoda import NEVER, EmulatorPart, SubModelOrder
from espalier.storage.client_state import PrivateState

EMULATOR = "emulator"
"""Name of a document that outlives rounds: the last two alignments.

Each entry has the blocks with LoRA, and the hashes of the blobs by part and key.
"""

LAST = "last-alignment"
"""Name of a document that outlives rounds: the number of the last alignment received.

It is kept apart from the alignments, so that a missing alignment is noticed.
"""


def take_any(site: Site, request: MessageBody) -> MessageBody:
    """Answer a ``deliver`` for the sub-model, for its emulator's LoRA, or for the adapters."""
    what = request.fields.get("what")
    if what == "model":
        return take_offer(site, request)
    if what == "piece":
        return take_piece(site, request)
    return _take_emulator(site, request) if what == "emulator" else take(site, request)


def _take_emulator(site: Site, request: MessageBody) -> MessageBody:
    """Store a part of the emulator's LoRA, and keep the previous alignment.

    An order of the previous round may be sent again and then needs the previous alignment.
    """
    state = site.state(request.header)
    part = validate(EmulatorPart, request.fields)
    with state.locked():
        kept = _kept(state)
        store = state.blobs_of(EMULATOR)
        # A part of another alignment begins a new entry; only the last two entries are kept.
        if not kept or (kept[-1]["aligned"], kept[-1]["blocks"]) != (part.aligned, part.blocks):
            kept = [*kept[-1:], {"aligned": part.aligned, "blocks": part.blocks, "parts": {}}]
        kept[-1]["parts"][str(request.header.part)] = {
            key: store.put(blob) for key, blob in request.blobs.items()
        }
        state.save_lasting(EMULATOR, {"kept": kept})
        state.save_lasting(LAST, {"aligned": part.aligned})
        store.keep_only(
            {blob for held in kept for hashes in held["parts"].values() for blob in hashes.values()}
        )
    return reply_to(request, NoFields())


@dataclass(frozen=True)
class HeldEmulator:
    """Emulator LoRA that is stored at this client."""

    blocks: list[int]
    """Blocks of the sub-model with emulator LoRA; empty if it was never aligned."""
    hashes: dict[str, str]
    """SHA-256 of its blobs, by key."""

    def blobs(self, state: PrivateState) -> dict[str, bytes]:
        """Return the blobs by key.

        Raises
        ------
        StateLost
            A blob is missing or damaged.
        """
        store = state.blobs_of(EMULATOR)
        try:
            return {key: store.get(blob) for key, blob in self.hashes.items()}
        except EspalierError as error:
            raise StateLost(f"train: the emulator's LoRA at this site: {error}") from None


def held_emulator(state: PrivateState, aligned: int | None = None) -> HeldEmulator:
    """Return the stored emulator LoRA of an alignment; None means the last one.

    Raises
    ------
    StateLost
        That alignment was not received here.
    """
    kept = _kept(state)
    if aligned is None:
        aligned = (state.load_lasting(LAST) or {"aligned": NEVER})["aligned"]
    if aligned == NEVER:
        return HeldEmulator([], {})
    found = next((held for held in kept if held["aligned"] == aligned), None)
    if found is None:
        raise StateLost("train: the emulator's LoRA at this site is of another round")
    return HeldEmulator(
        found["blocks"],
        {key: blob for part in found["parts"].values() for key, blob in part.items()},
    )


def _kept(state: PrivateState) -> list[dict[str, Any]]:
    kept: list[dict[str, Any]] = (state.load_lasting(EMULATOR) or {"kept": []})["kept"]
    return kept


def require_model(state: PrivateState, order: SubModelOrder) -> None:
    """Raise StateLost unless the sub-model that an order names was received here."""
    if offered_sha256(state) != order.model_sha256:
        raise StateLost(
            "train: the run's sub-model was not sent to this site, or its state was removed"
        )
