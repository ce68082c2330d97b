"""A device of FedSpine agrees on its cut before a round's training: it is asked once, and answers with bits that it keeps.

The importances of the last round that it trained in lie in its private state, beside the cut that they are of. Where they are
gone, or are of another cut than the server knows, nothing is cut, and training goes on with the cut of the request.

This is not ``answered_once``: a question counts when its answer is kept, as one that fails has told nothing and reads no text;
its answer is bits alone, without a report or parts; and that the settings are the same goes by the name of the state's folder.
"""

from typing import Any

from client_app.delivery import take
from client_app.site import Site, reply_to
from espalier.settings.fedspine import FedSpineSettings
from espalier.settings.mistakes import Mistake
from espalier.storage.blobs import sha256
from espalier.storage.private import PrivateState
from espalier.wire.cut_units import Cut, CutUnits
from espalier.wire.fedspine import STRUCTURE, CutOrder
from espalier.wire.messages import Letter, NoScalars, validate

AGREED = "agreed-cut"
"""Document of a round: what was asked, and what was answered."""
LAST = "last-cut"
"""Document that outlasts rounds: the last round whose question was answered."""


def take_or_cut(site: Site, request: Letter) -> Letter:
    """Answer a ``deliver``: the question what to cut, or a part of the global adapters."""
    header = request.header
    if header.part > 0 or header.server_round > site.settings.federation.rounds:
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
    """A second cut of a round would tell more; see ``_cut`` for rounds in which nothing was measured."""
    if kept is not None and kept["asked"] == asked:
        return
    last = state.load_lasting(LAST) or {"round": 0, "asked": None}
    if server_round < last["round"]:
        raise Mistake(
            f"deliver: this client has agreed on the cut of round {last['round']}; begin a new run"
        )
    if kept is not None or (server_round == last["round"] and last["asked"] != asked):
        raise Mistake(
            f"deliver: this client was asked for another cut in round {server_round}; begin a"
            " new run"
        )


def _cut(site: Site, state: PrivateState, request: Letter, pruned: float) -> tuple[bytes, str]:
    """The bits of what is cut now, and the hash of the measurement that they rest on.

    They are those of the request where this client measured nothing of such a model, or nothing since it last told a cut.
    """
    from client_app.measured_units import measured_units

    units = CutUnits.of(site.model.plan)
    told = (state.load_lasting(LAST) or {}).get("measured", "")
    before = units.read(request.blobs[STRUCTURE])
    values = measured_units(state, request.header.server_round, before)
    measured = "" if values is None else sha256(values.tobytes())
    if values is None or measured == told:
        return request.blobs[STRUCTURE], told
    return units.pack(_lowest(site, units, values, pruned, before)), measured


def _lowest(site: Site, units: CutUnits, values: Any, pruned: float, before: Cut) -> Cut:
    import torch

    from espalier.modeling.structured.units import ModelUnits

    scores = [
        {kind: torch.from_numpy(own) for kind, own in block.items()}
        for block in units.by_block(values)
    ]
    model = ModelUnits.of(site.model.plan)
    job = site.settings.of(FedSpineSettings)
    return units.side_by_side(model.lowest(scores, job, pruned, units.by_block(before)))
