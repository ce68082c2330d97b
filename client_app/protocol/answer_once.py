"""Protection against repeated questions: every method answers each round once.

Each answer to a different order for the same round would reveal more about the same data.

Covers: the same order is answered from the stored reply, also after a message was lost, the server
was killed, or the server went back to an earlier checkpoint. For the latest answered round, the
work is repeated if the stored reply is gone. A different order for a round is refused. Any order
for an earlier round is refused once its reply was deleted. An order counts from the moment work on
it begins, even if the work fails, because the failure may depend on the data. An order is
everything that the answer depends on, apart from the client's own data. The hash of the order is
kept when the other files of its round are deleted.

Does not cover: what a single answer reveals (see ``observer`` of the contracts), further runs (the
site's ``most-runs``), and a node whose owner deletes its state.
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from client_app.site import Site, reply_to
from espalier.errors import InputError
from espalier.messages.message import Header, Letter, Scalars, validate
from espalier.storage.blobs import sha256
from espalier.storage.client_state import PrivateState

R = TypeVar("R", bound=Scalars)

REPORT = "report"
"""Name of a per-round document: hash of the order, fields of the order, and the report."""
ANSWERED = "answered"
"""Name of a document that outlives rounds: hash of each answered order, by round number."""


@dataclass(frozen=True)
class Work(Generic[R]):
    """Work of a method in one round, and the composition of its reply."""

    report: type[R]
    """Type of the report that is sent next to the blobs and lists their hashes."""
    keys: Sequence[str]
    """Keys of all blobs, in the order of the hashes in the report."""
    first_part: Collection[str]
    """Keys of the blobs that are sent together with the report."""
    do: Callable[[PrivateState], R]
    """Function that does the work and stores the blobs in the round's client state."""
    rests_on: Callable[[PrivateState], Mapping[str, Any]] = lambda _: {}
    """Function that returns other inputs of the answer (JSON values), such as pushed parts."""
    require_ready: Callable[[PrivateState], None] = lambda _: None
    """Function that raises StateLost if the work cannot begin.

    It must not read the client's data: a failure here does not count as an answer.
    """


def answer_once(site: Site, request: Letter, work: Work[R]) -> Letter:
    """Answer a ``train`` request with the report and the first part of the blobs.

    Raises
    ------
    InputError
        This round was answered or begun for another order, or a later round was answered and the
        reply of this one is gone.
    """
    header = request.header
    state = site.state(request.header)
    # Hold the lock during the whole work, so that a repeated order waits for the first one.
    with state.locked():
        asked = _asked(site, request, work.rests_on(state))
        saved = state.load(header.server_round, REPORT)
        _require_new(state, header, asked, saved)
        if saved is None:
            work.require_ready(state)
            # Record the order before the work starts: a failure may depend on the data and counts
            # as an answer.
            _note(state, header.server_round, asked)
            report = work.do(state)
            saved = {"asked": asked, "order": request.scalars, "report": report.model_dump()}
            state.save(header.server_round, REPORT, saved)
        state.collect_garbage(header.server_round)
    told = validate(work.report, saved["report"])
    store = state.blobs(header.server_round)
    hashes = dict(zip(work.keys, saved["report"]["blob_sha256"], strict=True))
    return reply_to(request, told, {key: store.get(hashes[key]) for key in work.first_part})


def is_answered(state: PrivateState, server_round: int) -> bool:
    """Return whether an order of this round was answered or begun, even if the reply is gone."""
    return server_round in _answered(state)


def kept_report(site: Site, header: Header, what: str) -> dict[str, Any]:
    """Return the stored document of a round: ``order`` (fields of the request) and ``report``.

    Raises
    ------
    InputError
        The round was not answered. The message names ``what`` is missing.
    """
    saved = site.state(header).load(header.server_round, REPORT)
    if saved is None:
        raise InputError(
            f"{header.kind}: this client kept no {what} of round {header.server_round}; run the"
            " round again"
        )
    return saved


def _asked(site: Site, request: Letter, rests_on: Mapping[str, Any]) -> str:
    blobs = {key: sha256(blob) for key, blob in sorted(request.blobs.items())}
    number = request.header.server_round
    order = [
        site.settings.digest(),
        number,
        sorted(request.scalars.items()),
        blobs,
        sorted(rests_on.items()),
    ]
    return sha256(json.dumps(order).encode())


def _require_new(
    state: PrivateState, header: Header, asked: str, saved: Mapping[str, Any] | None
) -> None:
    answered = _answered(state)
    number = header.server_round
    known = answered.get(number) if saved is None else saved["asked"]
    if saved is not None and known == asked:
        return
    if number < (last := max(answered, default=0)):
        raise InputError(
            f"train: this client answered round {last}; round {number} is over; begin a new run"
        )
    if known not in (None, asked):
        raise InputError(
            f"train: this client answered another order of round {number}; begin a new run"
        )


def _note(state: PrivateState, server_round: int, asked: str) -> None:
    answered = _answered(state)
    if server_round not in answered:
        rounds = {
            str(number): order
            for number, order in sorted((answered | {server_round: asked}).items())
        }
        state.save_lasting(ANSWERED, {"rounds": rounds})


def _answered(state: PrivateState) -> dict[int, str]:
    kept = state.load_lasting(ANSWERED) or {"rounds": {}}
    return {int(number): order for number, order in kept["rounds"].items()}
