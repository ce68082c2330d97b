"""Idempotent replies: every request for work on private data is answered once.

Each answer to a different request of the same kind and round would reveal more about the same data.
An evaluation is answered once in a run.

Covers: the same request is answered from the stored reply, also after a message was lost, the
server was killed, or the server went back to an earlier checkpoint. For the latest answered round,
the work is repeated if the stored reply is gone. A different request is refused. Any request for an
earlier round is refused once its reply was deleted. A request counts from the moment work on it
begins, even if the work fails, because the failure may depend on the data. A request is everything
that the answer depends on, apart from the client's own data. The hash of the request is kept when
the other files of its round are deleted.

Does not cover: what a single answer reveals (see ``observer`` of the contracts), further runs (the
site's ``max-runs``), and a node whose owner deletes its state.

The client is registered as active among the clients of its machine, and reports progress. The
server is on the same machine as its simulated clients and shows their progress lines. The lines of
a site are written to the log of its node, and nowhere else.
"""

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from client_app.site import Site, reply_to
from espalier.errors import InputError
from espalier.messages.message import Fields, Header, Kind, MessageBody, validate
from espalier.progress import Throttle, progress_listener
from espalier.storage.activity import AtWork
from espalier.storage.blobs import sha256
from espalier.storage.client_state import PrivateState

ANSWERED = "answered"
"""Name of a document that outlives rounds: hash of each answered request, by kind and round.

The replies are in documents of their rounds, which have the names of the kinds.
"""
ONCE_IN_A_RUN = ("evaluate",)
"""Kinds of requests that are answered in one round of a run."""


def answer_once(
    site: Site,
    request: MessageBody,
    work: Callable[[PrivateState], Fields],
    rests_on: Callable[[PrivateState], Mapping[str, Any]] = lambda _: {},
    require_ready: Callable[[PrivateState], None] = lambda _: None,
) -> MessageBody:
    """Answer a request with the fields and the first part of the blobs that its contract names.

    Raises InputError if another request of this kind and round was answered or begun, or if a later
    round was answered and the reply of this one is gone.

    Parameters
    ----------
    work : function that does the work, stores the blobs in the round's client state, and returns
        the fields of the reply, which list the hashes of the blobs
    rests_on : function that returns other inputs of the answer (JSON values), such as pushed parts
    require_ready : function that raises StateLost if the work cannot begin. It must not read the
        client's data: a failure here does not count as an answer.
    """
    header = request.header
    state = site.state(header)
    # Hold the lock during the whole work, so that a repeated request waits for the first one.
    with state.locked():
        # Everything that the answer depends on, apart from the data itself.
        request_sha256 = _asked(site, request, rests_on(state))
        saved = state.load(header.server_round, header.kind)
        _require_new(state, header, request_sha256, saved)
        if saved is None:
            require_ready(state)
            # Record the request before the work starts: a failure may depend on the data and counts
            # as an answer.
            _note(state, header, request_sha256)
            report = work(state).model_dump()
            # The report is stored with the request, so a repetition is answered without the data.
            saved = {"asked": request_sha256, "order": request.fields, "report": report}
            state.save(header.server_round, header.kind, saved)
        # Replies of rounds before are not asked for again.
        state.collect_garbage(header.server_round)
    side = site.contract.up
    # The stored report is validated: files of the state directory may have been damaged.
    fields = validate(side.fields, saved["report"])
    if side.blob_sha256 is None:
        return reply_to(request, fields)
    # Blobs are read by hash, so a damaged one is noticed.
    store = state.blobs(header.server_round)
    hashes = side.blob_sha256(fields)
    return reply_to(request, fields, {key: store.get(hashes[key]) for key in side.blobs})


def is_answered(state: PrivateState, header: Header) -> bool:
    """Return whether a request was answered or begun, even if the reply is gone."""
    return header.server_round in _answered(state, header.kind)


def stored_reply(site: Site, header: Header, what: str) -> dict[str, Any]:
    """Return the stored answer to a round's order: ``order`` (its fields) and ``report``.

    Raises InputError, which names ``what`` is missing, if the round was not answered.
    """
    saved = site.state(header).load(header.server_round, "train")
    if saved is None:
        raise InputError(
            f"{header.kind}: this client kept no {what} of round {header.server_round}; run the"
            " round again"
        )
    return saved


def _asked(site: Site, request: MessageBody, rests_on: Mapping[str, Any]) -> str:
    # Hashes, so that the request fits in a small document.
    blobs = {key: sha256(blob) for key, blob in sorted(request.blobs.items())}
    order = [
        site.settings.digest(),
        request.header.server_round,
        sorted(request.fields.items()),
        blobs,
        sorted(rests_on.items()),
    ]
    return sha256(json.dumps(order).encode())


def _require_new(
    state: PrivateState, header: Header, request_sha256: str, saved: Mapping[str, Any] | None
) -> None:
    # The same request again.
    if saved is not None and saved["asked"] == request_sha256:
        return
    kind = header.kind
    number = header.server_round
    answered = _answered(state, kind)
    # A round that is over stays over, even if its reply is gone.
    if number < (last := max(answered, default=0)):
        raise InputError(
            f"{kind}: this client answered round {last}; round {number} is over; start a new run"
        )
    once_in_a_run = kind in ONCE_IN_A_RUN
    # Requests of this round, or of the whole run for an evaluation.
    earlier = {digest for place, digest in answered.items() if once_in_a_run or place == number}
    if earlier - {request_sha256} or saved is not None:
        place = "this run" if once_in_a_run else f"round {number}"
        raise InputError(
            f"{kind}: this client answered another request of {place}; start a new run"
        )


def _note(state: PrivateState, header: Header, request_sha256: str) -> None:
    # Sorted for a stable document.
    answered = _answered(state, header.kind) | {header.server_round: request_sha256}
    rounds = {str(number): order for number, order in sorted(answered.items())}
    state.save_lasting(ANSWERED, (state.load_lasting(ANSWERED) or {}) | {header.kind: rounds})


def _answered(state: PrivateState, kind: Kind) -> dict[int, str]:
    kept = (state.load_lasting(ANSWERED) or {}).get(kind, {})
    return {int(number): order for number, order in kept.items()}


@contextmanager
def at_work(site: Site, header: Header) -> Iterator[None]:
    """Register the client as active, and report progress, until the end of the ``with`` block."""
    with ExitStack() as stack:
        # The server shows progress lines of simulated clients.
        if site.node.simulated:
            work = AtWork(site.node.state_root(), header.lineage)
            stack.enter_context(work.working())
            say = work.say
        else:
            say = partial(print, file=sys.stderr, flush=True)
        stack.enter_context(
            progress_listener(Throttle(lambda line: say(f"{site.name:<12} {header.kind}: {line}")))
        )
        yield
