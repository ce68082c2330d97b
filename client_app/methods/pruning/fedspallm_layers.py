"""Layers of the global model at a FedSpaLLM client, stored until newer versions replace them."""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

from client_app.site import Site, reply_to
from espalier.errors import EspalierError
from espalier.messages.message import MessageBody, NoFields, validate
from espalier.methods.pruning.fedspallm import Update
from espalier.models.plan import block_key
from espalier.storage.client_state import PrivateState

StoredLayers = dict[str, dict[str, Any]]
"""Stored layers of the global model: index -> version and blob hash. Other layers are dense."""


def answer_push(site: Site, request: MessageBody) -> MessageBody:
    """Answer a ``push``: store layers that replace the base model's from this round on."""
    update = validate(Update, request.fields)
    state = site.state(request.header)
    server_round = request.header.server_round
    with state.locked():
        # A copy of the last layers: rounds before are not changed.
        stored = stored_layers(state, server_round)
        for index, version in zip(update.blocks, update.versions, strict=True):
            stored[str(index)] = {
                "version": version,
                "blob": state.lasting().put(request.blobs[block_key(index)]),
            }
        store_layers(state, server_round, stored)
    return reply_to(request, NoFields())


def stored_layers(state: PrivateState, server_round: int) -> StoredLayers:
    """Return the layers for a round: those pushed for it, else those of the previous round."""
    # Without a push for this round the layers are those of the round before.
    return _document(state, server_round) or _document(state, server_round - 1)


def are_stored(
    state: PrivateState, stored: StoredLayers, versions: Sequence[int], layers: Iterable[int]
) -> bool:
    """Return whether ``layers`` are stored undamaged in the versions of the global model.

    ``versions`` has the current version of each layer, 0 for a dense one.
    """
    store = state.lasting()
    for index in layers:
        layer = stored.get(str(index))
        if versions[index] != (layer["version"] if layer else 0):
            return False
        # Damaged files count as missing, so the server pushes them again.
        if layer and not store.is_whole(layer["blob"]):
            return False
    return True


def store_layers(state: PrivateState, server_round: int, stored: StoredLayers) -> None:
    """Record the layers of a round, and delete those that no adjacent round needs.

    The document of the next round exists if the final result was pushed before this message was
    repeated.
    """
    state.save(server_round, "stored-layers", stored)
    # Blobs of the rounds before and after are still needed for repeated requests.
    adjacent = [_document(state, server_round + step) for step in (-1, 1)]
    state.lasting().keep_only(
        {layer["blob"] for document in (stored, *adjacent) for layer in document.values()}
    )


def _document(state: PrivateState, server_round: int) -> StoredLayers:
    """Return the recorded layers of a round; a damaged document counts as lost."""
    with suppress(EspalierError):
        return dict(state.load(server_round, "stored-layers") or {})
    return {}
