"""Agreement between a FedSpine device and the server on what the device cuts in a round.

Before a round's training, the server asks the device once which prunable groups to cut. The device
answers with a bit mask and keeps that answer.

The importances from the last round in which the device trained are in its client state, together
with the cut that they were measured on. If they are missing, or were measured on another cut than
the server knows, the device cuts nothing, and training continues with the cut of the request.
"""

from client_app.protocol.answer_once import answer_once
from client_app.protocol.push import store_part
from client_app.site import Site
from espalier.messages.blobs.cut_bits import pack_bits, read_bits
from espalier.messages.message import MessageBody, NoFields, validate
from espalier.methods.tuning.fedspine import STRUCTURE, CutOrder, FedSpineSettings
from espalier.models.groups import Groups
from espalier.storage.blobs import sha256
from espalier.storage.client_state import PrivateState

AGREED = "agreed-cut"
"""Name of a per-round document: hash of the blob with the cut."""
MEASURED = "scored-groups"
"""Name of a document that outlives rounds: hash of the importances behind each cut, by round."""


def answer_push(site: Site, request: MessageBody) -> MessageBody:
    """Answer a ``push``: the question of what to cut, or a part of the global adapters."""
    header = request.header
    if header.part > 0 or header.server_round > site.settings.federation.rounds:
        # Only part 0 asks for a cut. After the last round, every part belongs to the final result.
        return store_part(site, request)

    state = site.state(header)
    store = state.blobs(header.server_round)

    def agree(state: PrivateState) -> NoFields:
        # The cut is stored by hash, so a repeated question gets the same bits.
        agreed = {"blob": store.put(_cut(site, state, request))}
        state.save(header.server_round, AGREED, agreed)
        return NoFields()

    answer = answer_once(site, request, agree)
    # Read again: the answer may be the stored one.
    kept = state.load(header.server_round, AGREED)
    assert kept is not None
    answer.blobs = {STRUCTURE: store.get(kept["blob"])}
    return answer


def _cut(site: Site, state: PrivateState, request: MessageBody) -> bytes:
    """Return the bits of the cut; those of the request if nothing new was measured on it."""
    import torch

    from client_app.methods.tuning.fedspine import measured_importance
    from espalier.hf.structured.selection import lowest

    number = request.header.server_round
    groups = Groups.of(site.model.plan)
    before = read_bits(groups, request.blobs[STRUCTURE])
    values = measured_importance(state, number, before)
    # Importances that led to a cut already must not lead to another one.
    used: dict[str, str] = state.load_lasting(MEASURED) or {}
    earlier = [int(key) for key in used if int(key) < number]
    measured = "" if values is None else sha256(values.tobytes())
    # Without a new measurement the cut of the request stays.
    if values is None or (earlier and measured == used[str(max(earlier))]):
        return request.blobs[STRUCTURE]
    state.save_lasting(MEASURED, used | {str(number): measured})
    pruned = validate(CutOrder, request.fields).pruned
    job = site.settings.of(FedSpineSettings)
    # The cut grows: groups that were cut stay cut.
    return pack_bits(lowest(groups, torch.from_numpy(values), job, pruned, before))
