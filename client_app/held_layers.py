"""Layers of the global model at a client of FedSpaLLM: kept as they are delivered, until newer ones take their place."""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

from client_app.site import Site, reply_to
from espalier.settings.mistakes import Mistake
from espalier.storage.private import PrivateState
from espalier.wire.fedspallm import Update
from espalier.wire.messages import Letter, NoScalars, validate
from espalier.wire.payload import block_key

Held = dict[str, dict[str, Any]]
"""Layers of the global model that this client holds: index -> version and hash of its blob; others are dense."""


def take_layers(site: Site, request: Letter) -> Letter:
    """Answer a ``deliver``: keep layers of the global model; they stand in for the base model's from this round on."""
    update = validate(Update, request.scalars)
    state = site.state(request.header)
    server_round = request.header.server_round
    with state.locked():
        held = held_in(state, server_round)
        for index, version in zip(update.blocks, update.versions, strict=True):
            held[str(index)] = {
                "version": version,
                "blob": state.lasting().put(request.blobs[block_key(index)]),
            }
        hold(state, server_round, held)
    return reply_to(request, NoScalars())


def held_in(state: PrivateState, server_round: int) -> Held:
    """What the client holds in a round: what was delivered for it, else what it held in the round before."""
    return _document(state, server_round) or _document(state, server_round - 1)


def holds(state: PrivateState, held: Held, versions: Sequence[int], layers: Iterable[int]) -> bool:
    """Whether some layers are held, and whole, in the versions that the global model has, by number of the layer."""
    wanted = {str(index): versions[index] for index in layers}
    if any(
        held.get(index, {"version": 0})["version"] != version for index, version in wanted.items()
    ):
        return False
    return all(state.lasting().is_whole(held[index]["blob"]) for index in wanted if index in held)


def hold(state: PrivateState, server_round: int, held: Held) -> None:
    """Note what is held from this round on, and let go of layers that neither it nor the rounds beside it need.

    The round after it is there when a message comes once more that brings what is evaluated after the last round.
    """
    state.save(server_round, "held", held)
    beside = [_document(state, server_round + step) for step in (-1, 1)]
    state.lasting().keep_only(
        {layer["blob"] for document in (held, *beside) for layer in document.values()}
    )


def _document(state: PrivateState, server_round: int) -> Held:
    """What is noted of a round; nothing where that is damaged, so that its layers count as lost."""
    with suppress(Mistake):
        return dict(state.load(server_round, "held") or {})
    return {}
