"""Protection against repeated evaluation: a client answers one evaluation per run.

Each further evaluation would reveal more about the same data.

Covers: the same request is answered from the stored reply, or computed again if there is none. A
different request is refused, whatever its content, even while the first is in progress.

Does not cover: what one evaluation reveals (see ``observer`` of the contract), further runs (the
site's ``most-runs``), and a node whose owner deletes its state.
"""

import json
from collections.abc import Callable

from client_app.site import Site, reply_to
from espalier.errors import EspalierError, InputError
from espalier.messages.evaluation import Losses
from espalier.messages.message import Letter, validate
from espalier.storage.blobs import sha256
from espalier.storage.client_state import PrivateState

EVALUATION = "evaluation"
"""Name of the document with the hash of the request and the reply."""


def told_once(site: Site, request: Letter, work: Callable[[], Letter]) -> Letter:
    """Answer one evaluation per run.

    Raises
    ------
    InputError
        Another evaluation was requested before in this run.
    """
    state = site.state(request.header)
    # Hold the lock during the whole work, so that a repeated request waits for the first one.
    with state.locked():
        asked = _asked(state, request)
        kept = state.load_lasting(EVALUATION)
        if kept is not None and kept["asked"] != asked:
            raise InputError(
                "evaluate: this client answered another evaluation in this run; begin a new run"
            )
        if kept is not None and kept["told"] is not None:
            return reply_to(request, validate(Losses, kept["told"]))
        # Recorded before the work, so that a different request is refused meanwhile.
        state.save_lasting(EVALUATION, {"asked": asked, "told": None})
        try:
            letter = work()
        # No result was sent, so the evaluation does not count.
        except EspalierError:
            if kept is None:
                state.forget_lasting(EVALUATION)
            raise
        state.save_lasting(EVALUATION, {"asked": asked, "told": letter.scalars})
    return letter


def _asked(state: PrivateState, request: Letter) -> str:
    """Return the hash of everything that an answer depends on, apart from the client's own data.

    It covers the request and the results that are evaluated.
    """
    number = request.header.server_round
    blobs = {key: sha256(blob) for key, blob in sorted(request.blobs.items())}
    # The final result is pushed as if for one more round.
    results = [state.documents(number), state.documents(number + 1), state.brought()]
    return sha256(json.dumps([number, sorted(request.scalars.items()), blobs, results]).encode())
