"""An evaluation is told once in a run: each further one would tell more of the same data.

Covers: the same request is answered from what was kept, or worked on again if nothing was; another one is refused, whatever
it asks about, also while the first is at work.
Does not cover: what one evaluation tells (see the contract's ``observer``), a further run (the site's ``most-runs``), or a
node whose owner removes its state.
"""

import json
from collections.abc import Callable

from client_app.site import Site, reply_to
from espalier.settings.mistakes import Mistake
from espalier.storage.blobs import sha256
from espalier.storage.private import PrivateState
from espalier.wire.evaluation import Losses
from espalier.wire.messages import Letter, validate

EVALUATION = "evaluation"
"""Document that holds what was asked, and what was answered."""


def told_once(site: Site, request: Letter, work: Callable[[], Letter]) -> Letter:
    """Answer an ``evaluate``.

    Raises
    ------
    Mistake
        Another evaluation was asked for in this run.
    """
    state = site.state(request.header)
    with state.locked():  # over the whole work: the same request, again, waits for the first
        asked = _asked(state, request)
        kept = state.load_lasting(EVALUATION)
        if kept is not None and kept["asked"] != asked:
            raise Mistake(
                "evaluate: this client answered another evaluation in this run; begin a new run"
            )
        if kept is not None and kept["told"] is not None:
            return reply_to(request, validate(Losses, kept["told"]))
        state.save_lasting(EVALUATION, {"asked": asked, "told": None})
        try:
            letter = work()
        except Mistake:  # nothing was told
            if kept is None:
                state.forget_lasting(EVALUATION)
            raise
        state.save_lasting(EVALUATION, {"asked": asked, "told": letter.scalars})
    return letter


def _asked(state: PrivateState, request: Letter) -> str:
    """All that an answer depends on, beside the client's own data: what was asked, and the results that are evaluated."""
    number = request.header.server_round
    blobs = {key: sha256(blob) for key, blob in sorted(request.blobs.items())}
    results = [state.documents(number), state.documents(number + 1), state.brought()]
    return sha256(json.dumps([number, sorted(request.scalars.items()), blobs, results]).encode())
