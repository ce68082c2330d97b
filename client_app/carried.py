"""Tensors that one round of a client leaves for the next: what a payload lost, the optimiser's moments, what units are worth.

A round may be asked for again, after its reply was lost or the server was resumed; it must then begin with what the round
before it left, not with its own leavings. So those of the last two rounds are kept.
"""

from typing import Any

from safetensors.torch import load, save
from torch import Tensor

from espalier.storage.private import PrivateState
from espalier.wire.adapters import Tensors

FEEDBACK = "feedback"
"""What a client's payloads lost."""
MOMENTS = "moments"
"""Running means of AdamW, and the number of its steps."""
CONDITIONING = "conditioning"
"""A client's own embedding, and AdamW's moments of it (SFT-P)."""
IMPORTANCE = "importance"
"""What units of a client's model are worth (FedSpine)."""
DOCUMENTS = (FEEDBACK, MOMENTS, CONDITIONING, IMPORTANCE)


def before(state: PrivateState, document: str, server_round: int) -> dict[str, dict[str, Tensor]]:
    """What the last round before ``server_round`` left; empty if there was none."""
    earlier = [entry for entry in _entries(state, document) if entry["round"] < server_round]
    store = state.lasting()
    return (
        {key: load(store.get(blob)) for key, blob in earlier[-1]["blobs"].items()}
        if earlier
        else {}
    )


def keep(state: PrivateState, document: str, server_round: int, tensors: Tensors) -> None:
    """Leave tensors for the rounds after ``server_round``."""
    store = state.lasting()
    blobs = {
        key: store.put(save({name: value.cpu() for name, value in block.items()}))
        for key, block in tensors.items()
    }
    earlier = [entry for entry in _entries(state, document) if entry["round"] < server_round]
    state.save_lasting(document, {"kept": [*earlier[-1:], {"round": server_round, "blobs": blobs}]})
    store.keep_only(
        {
            blob
            for name in DOCUMENTS
            for entry in _entries(state, name)
            for blob in entry["blobs"].values()
        }
    )


def _entries(state: PrivateState, document: str) -> list[dict[str, Any]]:
    kept: list[dict[str, Any]] = (state.load_lasting(document) or {"kept": []})["kept"]
    return kept
