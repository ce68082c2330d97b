"""Agreement between a FedSpine device and the server on what the device cuts in a round.

Before a round's training, the server asks the device once which prunable groups to cut. The device
answers with a bit mask and keeps that answer.

The importances from the last round in which the device trained are in its client state, together
with the cut that they were measured on. If they are missing, or were measured on another cut than
the server knows, the device cuts nothing, and training continues with the cut of the request.

This module does not use ``answered_once``, for three reasons. A question counts only when its
answer is stored, because a failed question reveals nothing and reads no text. The answer consists
of bits only, without a report or parts. The folder name of the client state already guarantees that
the settings are the same.
"""

from typing import Any

from client_app.protocol.push import take
from client_app.site import Site, reply_to
from espalier.errors import InputError
from espalier.messages.blobs.group_bits import pack_bits, read_bits
from espalier.messages.message import Letter, NoScalars, validate
from espalier.methods.fedspine.contract import STRUCTURE, CutOrder
from espalier.methods.fedspine.settings import FedSpineSettings
from espalier.models.groups import Groups
from espalier.storage.blobs import sha256
from espalier.storage.client_state import PrivateState

AGREED = "agreed-cut"
"""Name of a per-round document: the question and its answer."""
LAST = "last-cut"
"""Name of a document that outlives rounds: the last round whose question was answered."""


def take_or_cut(site: Site, request: Letter) -> Letter:
    """Answer a ``deliver``: the question of what to cut, or a part of the global adapters."""
    header = request.header
    if header.part > 0 or header.server_round > site.settings.federation.rounds:
        # Only part 0 asks for a cut. After the last round, every part belongs to the final result.
        return take(site, request)
    state = site.state(header)
    number = header.server_round
    with state.locked():
        pruned = validate(CutOrder, request.scalars).pruned
        asked = {"pruned": pruned, "before": sha256(request.blobs[STRUCTURE])}
        kept = state.load(number, AGREED)
        _require_new(state, number, asked, kept)
        if kept is None:
            blob, measured = _cut(site, state, request, pruned)
            kept = {"asked": asked, "blob": state.blobs(number).put(blob)}
            state.save(number, AGREED, kept)
            state.save_lasting(LAST, {"round": number, "asked": asked, "measured": measured})
        return reply_to(request, NoScalars(), {STRUCTURE: state.blobs(number).get(kept["blob"])})


def _require_new(
    state: PrivateState, server_round: int, asked: dict[str, Any], kept: dict[str, Any] | None
) -> None:
    """Raise InputError if this round, or a later one, was already answered for another question.

    A second cut in the same round would reveal more about the data. ``_cut`` handles rounds in
    which nothing was measured.
    """
    if kept is not None and kept["asked"] == asked:
        return
    last = state.load_lasting(LAST) or {"round": 0, "asked": None}
    if server_round < last["round"]:
        raise InputError(
            f"deliver: this client has agreed on the cut of round {last['round']}; begin a new run"
        )
    if kept is not None or (server_round == last["round"] and last["asked"] != asked):
        raise InputError(
            f"deliver: this client was asked for another cut in round {server_round}; begin a"
            " new run"
        )


def _cut(site: Site, state: PrivateState, request: Letter, pruned: float) -> tuple[bytes, str]:
    """Return the bit mask of the cut, and the hash of the importances that it is based on.

    The bits are those of the request if this client has no importances of that model, or no new
    ones since its last answer.
    """
    import torch

    from client_app.methods.fedspine.importance import measured_importance
    from espalier.hf.structured.selection import lowest

    groups = Groups.of(site.model.plan)
    told = (state.load_lasting(LAST) or {}).get("measured", "")
    before = read_bits(groups, request.blobs[STRUCTURE])
    values = measured_importance(state, request.header.server_round, before)
    measured = "" if values is None else sha256(values.tobytes())
    if values is None or measured == told:
        return request.blobs[STRUCTURE], told
    job = site.settings.of(FedSpineSettings)
    return pack_bits(lowest(groups, torch.from_numpy(values), job, pruned, before)), measured
