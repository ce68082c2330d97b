"""Tensors that one round of a client leaves for the next.

They are the error feedback of its payloads, the optimizer's moments, and the importances of
prunable groups.

A round may be requested again, after its reply was lost or the server was resumed. It must then
begin with the tensors of the previous round, not with its own. Therefore the tensors of the last
two rounds are kept.
"""

from typing import Any

from safetensors.torch import load, save
from torch import Tensor

from espalier.models.adapters import Tensors
from espalier.storage.client_state import PrivateState

FEEDBACK = "feedback"
"""Name of the document for quantization errors of a client's payloads (error feedback)."""
CONDITIONING = "conditioning"
"""Name of the document for a client's own embedding and AdamW's moments for it (SFT-P)."""
IMPORTANCE = "importance"
"""Name of the document for the importances of a client's prunable groups (FedSpine)."""
DOCUMENTS = (FEEDBACK, CONDITIONING, IMPORTANCE)


def before(state: PrivateState, document: str, server_round: int) -> dict[str, dict[str, Tensor]]:
    """Return the tensors of the last round before ``server_round``, or {} if there are none."""
    earlier = [entry for entry in _entries(state, document) if entry["round"] < server_round]
    store = state.lasting()
    return (
        {key: load(store.get(blob)) for key, blob in earlier[-1]["blobs"].items()}
        if earlier
        else {}
    )


def keep(state: PrivateState, document: str, server_round: int, tensors: Tensors) -> None:
    """Store tensors for the rounds after ``server_round``."""
    store = state.lasting()
    blobs = {
        key: store.put(save({name: value.cpu() for name, value in block.items()}))
        for key, block in tensors.items()
    }
    # An entry of this round or a later one comes from an earlier attempt and is replaced.
    # ``earlier[-1:]``: a repetition of this round begins with the entry before it.
    earlier = [entry for entry in _entries(state, document) if entry["round"] < server_round]
    state.save_lasting(document, {"kept": [*earlier[-1:], {"round": server_round, "blobs": blobs}]})
    # Blobs of all documents share one store.
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
