"""Local baseline, computed once per round: a repeated request is answered from the stored result.

The lock of the client state is held during the whole work, so that no two processes do it at the
same time. ``answered_once`` does the same for ``train``, and ``told_once`` for ``evaluate``.
"""

import time
from collections.abc import Callable
from typing import Any

from client_app.site import Site, reply_to
from espalier.errors import InputError
from espalier.messages.local_baseline import AloneReport
from espalier.messages.message import Header, Letter
from espalier.storage.client_state import PrivateState

ALONE = "alone"
"""Name of a per-round document: the local baseline."""


def make_alone(
    site: Site, request: Letter, make: Callable[[PrivateState], dict[str, Any]]
) -> Letter:
    """Answer an ``alone`` request: call ``make`` and store its result for ``kept_alone``."""
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
    """Return the stored result of ``make``.

    Raises
    ------
    InputError
        There was no ``alone`` request in this round.
    """
    saved = site.state(header).load(header.server_round, ALONE)
    if saved is None or saved["settings"] != site.settings.digest():
        raise InputError(
            f"{header.kind}: this client made nothing by itself in round {header.server_round};"
            " resume the run"
        )
    made: dict[str, Any] = saved["made"]
    return made
