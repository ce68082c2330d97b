"""Local baseline: made once in answer to a ``local_baseline`` request, and kept at the client."""

import time
from collections.abc import Callable
from typing import Any

from client_app.protocol.answer_once import answer_once
from client_app.site import Site
from espalier.errors import InputError
from espalier.messages.local_baseline import BaselineReport
from espalier.messages.message import Header, MessageBody
from espalier.storage.client_state import PrivateState

BASELINE = "local-baseline"
"""Name of a per-round document: what ``make`` returned."""


def make_local_baseline(
    site: Site, request: MessageBody, make: Callable[[PrivateState], dict[str, Any]]
) -> MessageBody:
    """Answer the request: call ``make``, and store its result for ``stored_local_baseline``."""

    def work(state: PrivateState) -> BaselineReport:
        started = time.monotonic()
        state.save(request.header.server_round, BASELINE, make(state))
        return BaselineReport(seconds=time.monotonic() - started)

    return answer_once(site, request, work)


def stored_local_baseline(site: Site, header: Header) -> dict[str, Any]:
    """Return the stored result of ``make``; InputError if the round has none."""
    made = site.state(header).load(header.server_round, BASELINE)
    if made is None:
        raise InputError(
            f"{header.kind}: this client made nothing by itself in round {header.server_round};"
            " resume the run"
        )
    return made
