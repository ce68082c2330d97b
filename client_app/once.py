"""Work that is done once: a message that comes again waits for the first one, and is answered from what that one kept.

The lock of the client's private state is held over the whole work, so that no two processes do it at once. ``answered_once``
has the answers to ``train``, and ``told_once`` that to an ``evaluate``; here is what the client makes by itself.
"""

import time
from collections.abc import Callable
from typing import Any

from client_app.site import Site, reply_to
from espalier.settings.mistakes import Mistake
from espalier.storage.private import PrivateState
from espalier.wire.alone import AloneReport
from espalier.wire.messages import Header, Letter

ALONE = "alone"
"""Document of a round: what the client made by itself."""


def make_alone(
    site: Site, request: Letter, make: Callable[[PrivateState], dict[str, Any]]
) -> Letter:
    """Answer an ``alone``: make what the client makes by itself, and keep what ``make`` returns; see ``kept_alone``."""
    header = request.header
    state = site.state(header)
    settings = site.settings.digest()
    with state.locked():
        saved = state.load(header.server_round, ALONE)
        if saved is None or saved["settings"] != settings:
            started = time.monotonic()
            made = make(state)
            saved = {"settings": settings, "seconds": time.monotonic() - started, "made": made}
            state.save(header.server_round, ALONE, saved)
    return reply_to(request, AloneReport(seconds=saved["seconds"]))


def kept_alone(site: Site, header: Header) -> dict[str, Any]:
    """What ``make`` returned.

    Raises
    ------
    Mistake
        There was no ``alone`` in this round.
    """
    saved = site.state(header).load(header.server_round, ALONE)
    if saved is None or saved["settings"] != site.settings.digest():
        raise Mistake(
            f"{header.kind}: this client made nothing by itself in round {header.server_round};"
            " resume the run"
        )
    made: dict[str, Any] = saved["made"]
    return made
