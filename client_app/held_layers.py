"""Layers of the global model at a client of FedSpaLLM: kept as they are delivered, until newer ones take their place."""

from collections.abc import Iterable, Sequence
from typing import Any

from client_app.site import Site, reply_to
from espalier.storage.private import PrivateState
from espalier.wire.fedspallm import Update
from espalier.wire.messages import Letter, NoScalars, validate
from espalier.wire.payload import block_key

Held = dict[str, dict[str, Any]]
"""Layers of the global model that this client holds: index -> version and hash of its blob; others are dense."""


def take_layers(site: Site, request: Letter) -> Letter:
    """Answer a ``deliver``: keep layers of the global model; they stand in for the base model's from this round on."""
    update, state = validate(Update, request.scalars), site.state(request.header)
    server_round = request.header.server_round
    with state.locked():
        held = held_in(state, server_round)
        for index, version in zip(update.blocks, update.versions, strict=True):
            held[str(index)] = {"version": version, "blob": state.lasting().put(request.blobs[block_key(index)])}
        hold(state, server_round, held)
    return reply_to(request, NoScalars())


def held_in(state: PrivateState, server_round: int) -> Held:
    """What the client holds in a round: what was delivered for it, else what it held in the round before."""
    document = state.load(server_round, "held") or state.load(server_round - 1, "held") or {}
    return dict(document)


def holds(held: Held, versions: Sequence[int], layers: Iterable[int]) -> bool:
    """Whether some layers are held in the versions that the global model has, by number of the layer."""
    return all(held.get(str(index), {"version": 0})["version"] == versions[index] for index in layers)


def hold(state: PrivateState, server_round: int, held: Held) -> None:
    """Note what is held from this round on, and let go of layers that neither it nor the rounds beside it need.

    The round after it is there when a message comes once more that brings what is evaluated after the last round.
    """
    state.save(server_round, "held", held)
    beside = [state.load(server_round + step, "held") or {} for step in (-1, 1)]
    state.lasting().keep_only({layer["blob"] for document in (held, *beside) for layer in document.values()})
