"""Agreement between a FedSpine device and the server on what the device cuts in a round.

Before a round's training, the server asks the device once which prunable groups to cut. The device
answers with a bit mask and keeps that answer.

The importances from the last round in which the device trained are in its client state, together
with the cut that they were measured on. If they are missing, or were measured on another cut than
the server knows, the device cuts nothing, and training continues with the cut of the request.
"""

from typing import Any

from pydantic import Field

from client_app.protocol.answer_once import Work, answer_once
from client_app.protocol.push import take
from client_app.site import Site, reply_to
from espalier.messages.blobs.group_bits import Cut, CutUnits
from espalier.messages.message import Letter, NoScalars, Scalars, validate
from espalier.messages.parts import Sha256
from espalier.methods.fedspine.contract import STRUCTURE, CutOrder
from espalier.methods.fedspine.settings import FedSpineSettings
from espalier.storage.blobs import sha256
from espalier.storage.client_state import PrivateState

MEASURED = "measured-units"
"""Name of a document that outlives rounds: hash of the importances behind each cut, by round."""


class Agreed(Scalars):
    """Stored answer to a request to cut; its hash is not sent."""

    blob_sha256: list[Sha256] = Field(min_length=1, max_length=1)


def take_or_cut(site: Site, request: Letter) -> Letter:
    """Answer a ``deliver``: the question of what to cut, or a part of the global adapters."""
    header = request.header
    if header.part > 0 or header.server_round > site.settings.federation.rounds:
        # Only part 0 asks for a cut. After the last round, every part belongs to the final result.
        return take(site, request)

    def agree(state: PrivateState) -> Agreed:
        blob = _cut(site, state, request)
        return Agreed(blob_sha256=[state.blobs(header.server_round).put(blob)])

    answer = answer_once(site, request, Work(Agreed, [STRUCTURE], [STRUCTURE], agree))
    return reply_to(request, NoScalars(), answer.blobs)


def _cut(site: Site, state: PrivateState, request: Letter) -> bytes:
    """Return the bit mask of the cut.

    The bits are those of the request if this client has no importances of that model, or no new
    ones since its last cut.
    """
    from client_app.methods.fedspine.importance import measured_units

    number = request.header.server_round
    units = CutUnits.of(site.model.plan)
    before = units.read(request.blobs[STRUCTURE])
    values = measured_units(state, number, before)
    used: dict[str, str] = state.load_lasting(MEASURED) or {}
    earlier = [int(one) for one in used if int(one) < number]
    measured = "" if values is None else sha256(values.tobytes())
    if values is None or (earlier and measured == used[str(max(earlier))]):
        return request.blobs[STRUCTURE]
    state.save_lasting(MEASURED, used | {str(number): measured})
    pruned = validate(CutOrder, request.scalars).pruned
    return units.pack(_lowest(site, units, values, pruned, before))


def _lowest(site: Site, units: CutUnits, values: Any, pruned: float, before: Cut) -> Cut:
    import torch

    from espalier.hf.structured.groups import ModelUnits

    scores = [
        {kind: torch.from_numpy(own) for kind, own in block.items()}
        for block in units.by_block(values)
    ]
    model = ModelUnits.of(site.model.plan)
    job = site.settings.of(FedSpineSettings)
    return units.side_by_side(model.lowest(scores, job, pruned, units.by_block(before)))
