"""A round is answered once, by every method: each answer to another order of it would tell more of the same data.

Covers: the same order is answered from what was kept, also after a message was lost, the server was killed, or went back to the
checkpoint before; of the last round it is worked on again where the reply is gone. Another order of a round is refused, and so
is any order of a round before the last, once its reply was let go. An order counts from when work on it begins, also where that
fails: whether it does may follow from the data too. An order is all that an answer depends on, beside the client's own data.
Its hash stays when the rest of its round is let go.
Does not cover: what one answer tells (see the contracts' ``observer``), a further run (the site's ``most-runs``), or a node
whose owner removes its state.
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from client_app.site import Site, reply_to
from espalier.settings.mistakes import Mistake
from espalier.storage.blobs import sha256
from espalier.storage.private import PrivateState
from espalier.wire.messages import Header, Letter, Scalars, validate

R = TypeVar("R", bound=Scalars)

REPORT = "report"
"""Document of a round: what was asked, the order's scalars, and what was reported."""
ANSWERED = "answered"
"""Document that outlasts rounds: the hash of each answered order, by the round's number."""


@dataclass(frozen=True)
class Work(Generic[R]):
    """A method's work in a round, and how its reply is made."""

    report: type[R]
    """What is said beside the blobs; it names their hashes."""
    keys: Sequence[str]
    """Of all blobs, in the order of the report's hashes."""
    first_part: Collection[str]
    """Keys of the blobs that go with the report."""
    do: Callable[[PrivateState], R]
    """Does the work, and keeps the blobs in the private state's round."""
    rests_on: Callable[[PrivateState], Mapping[str, Any]] = lambda _: {}
    """What the answer depends on that is not in the order's message, JSON values only: what was delivered before."""
    require_ready: Callable[[PrivateState], None] = lambda _: None
    """Raises StateLost where the work cannot begin, which uses nothing up: it reads nothing of the client's data."""


def answer_once(site: Site, request: Letter, work: Work[R]) -> Letter:
    """Answer a ``train`` with its report and the first part.

    Raises
    ------
    Mistake
        Another order of this round was answered or begun, or a later round was and this one's reply is gone.
    """
    header = request.header
    state = site.state(request.header)
    with state.locked():  # over the whole work: the same order, again, waits for the first
        asked = _asked(site, request, work.rests_on(state))
        saved = state.load(header.server_round, REPORT)
        _require_new(state, header, asked, saved)
        if saved is None:
            work.require_ready(state)
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
    """Whether an order of a round was answered, or begun; whether or not the reply is still there."""
    return server_round in _answered(state)


def kept_report(site: Site, header: Header, what: str) -> dict[str, Any]:
    """What was kept of a round: ``order``, the scalars of its message, and ``report``.

    Raises
    ------
    Mistake
        The round was not answered; it says ``what`` is missing.
    """
    saved = site.state(header).load(header.server_round, REPORT)
    if saved is None:
        raise Mistake(
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
        raise Mistake(
            f"train: this client answered round {last}; round {number} is over; begin a new run"
        )
    if known not in (None, asked):
        raise Mistake(
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
