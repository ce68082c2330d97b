"""Base class of all methods: the questions that ``Federation`` asks in the course of a run.

A method overrides what differs from other methods. What methods share is in objects that they
have, such as ``AdapterAverager``; ``Tuning`` asks it by default. No method derives from another.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, runtime_checkable

from espalier.errors import InputError
from espalier.hf.opening.opened_model import OpenedModel
from espalier.messages.local_baseline import BaselineOrder
from espalier.messages.message import Fields, MessageBody, NoFields
from espalier.messages.parts import PartRequest
from espalier.settings.registry import METHODS, part
from espalier.settings.run import RunSettings
from strategies.base.evaluation import ClientEvaluation
from strategies.base.inbox import Inbox
from strategies.base.roster import Seat
from strategies.base.run import Run
from strategies.base.sums.unmasking import Sums


class RunResult(Protocol):
    """Result of the rounds so far.

    Large data are stored as blobs of the checkpoint; the result names them by their hash.
    """

    STATE: ClassVar[tuple[str, ...]] = ()
    """Attributes that a checkpoint stores as they are."""

    def state(self) -> dict[str, Any]:
        """Return the state for the checkpoint; it holds JSON values only."""
        return {name: getattr(self, name) for name in self.STATE}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the state that ``state`` returned."""
        for name in self.STATE:
            setattr(self, name, state[name])

    def stored(self) -> Collection[str]:
        """Return the hashes of all blobs that ``state`` names."""

    def report(self) -> dict[str, Any]:
        """Return the method's own entries of ``summary.json``."""


@dataclass(frozen=True)
class ProgressWords:
    """Nouns and verbs of a method's progress lines."""

    sent: str = "results"
    """Plural noun for what clients send."""
    title: str = "replies"
    """Title of the progress of arriving replies."""
    event: str = "reply"
    """Name of the event of a complete reply."""


@dataclass(frozen=True)
class Selection:
    """Clients that a round asks."""

    clients: Sequence[int]
    quorum_of: int | None = None
    """Number of clients that the quorum refers to; None: all clients of the run."""


@dataclass(frozen=True)
class ClientOrder:
    """Request to a client in a round, and how its reply is fetched."""

    fields: Fields = field(default_factory=NoFields)
    """Fields of ``train``."""
    blobs: Mapping[str, bytes] = field(default_factory=dict)
    """Blobs of ``train``."""
    along: Mapping[str, bytes] = field(default_factory=dict)
    """Further blobs of ``train`` and of each ``fetch``, if fields do not determine the shapes."""
    fetch: Callable[[Mapping[str, Any], list[str]], PartRequest] = lambda report, hashes: (
        PartRequest(blob_sha256=hashes)
    )
    """Function of the client's report and some hashes: the fields of a ``fetch`` of these blobs."""
    sends: str = ""
    """Phrase for the complete reply, if it is not ``ProgressWords.sent``."""


def require_fit(
    settings: RunSettings, model: OpenedModel, capabilities: Mapping[str, float]
) -> None:
    """Raise InputError if the method of a run cannot work with this model.

    Parameters and further errors are those of ``Method.require_fit``.
    """
    # Not every model fits every method.
    if settings.job.PRUNES and model.family.experts:
        raise InputError(
            f"method = {settings.method!r}: {model.directory} is a mixture of experts (model_type ="
            f" {model.config['model_type']!r}), of which only attention can be tuned so far; set"
            " method to 'fedpetuning', 'hetlora', 'flora' or 'fed-sb', or name a dense model"
        )
    part(METHODS[settings.method].strategy).require_fit(settings, model, capabilities)


class Method(ABC):
    """One method: what the server decides, sends and aggregates.

    A round has these steps. The server prepares it (``before_round``); its decisions are in the
    checkpoint before a message is sent. Clients receive what they need (``prepare``) and their
    orders (``order``); replies arrive part by part. Clients that lost their state catch up once
    (``catch_up``). Complete replies without a fault (``fault_of``) are aggregated (``fold``). The
    checkpoint (``state``) ends the round.
    """

    WORDS = ProgressWords()
    result: RunResult
    """Result of the rounds."""

    def __init__(self, run: Run, evaluation: ClientEvaluation) -> None:
        self.run = run
        self.rounds = run.rounds
        self.evaluation = evaluation

    @classmethod
    def require_fit(
        cls, settings: RunSettings, model: OpenedModel, capabilities: Mapping[str, float]
    ) -> None:
        """Raise InputError if a run is impossible with this model, before anything is started.

        ``capabilities`` has the known ones by client name: all in a simulation, none in a
        deployment.
        """
        return

    @property
    def num_rounds(self) -> int:
        """Number of rounds of the run; it may grow during the run if work is left.

        By default it is the number that the settings define.
        """
        return self.run.settings.job.num_rounds(self.run.settings.federation)

    def before_round(self, server_round: int) -> bool:
        """Decide at the server what a round needs, before any message.

        Return True if a checkpoint must be written before messages are sent. After it, a resumed
        run does not call this function for the round again.
        """
        return False

    def prepare(self, server_round: int, save: Callable[[], None]) -> Selection | None:
        """Push to the clients what they need for a round, and select the clients that it asks.

        ``save`` writes a checkpoint, for what clients have received so far. None selects all
        clients that still take part.
        """
        return None

    def order(self, server_round: int, client: int) -> ClientOrder:
        """Return the order of a client in a round, by default one without content."""
        return ClientOrder()

    def catch_up(self, server_round: int) -> Callable[[Sequence[int]], None] | None:
        """Return a function that pushes to clients the state that they lost.

        None if a client that has lost state of this round cannot receive it again.
        """
        return None

    def note_part(self, seat: Seat, body: MessageBody) -> None:
        """Record what the summary and ``fold`` need of an arriving part of a client's reply.

        The part has no blobs, but the tensors of adapters. The first part (``train``) has a report.
        """
        return

    def fault_of(self, inbox: Inbox, client: int) -> str | None:
        """Return why a client's complete reply is not plausible; None if it is.

        The client is dropped with this reason.
        """
        return None

    @abstractmethod
    def fold(self, server_round: int, inbox: Inbox, clients: list[int]) -> None:
        """Aggregate the replies of these clients, in client order."""

    def push_result(self, server_round: int) -> None:
        """Push the result to the clients after the last round, if they need it."""
        return

    def local_baseline_request(self, seat: Seat) -> BaselineOrder | None:
        """Return the order for a client's local baseline; None if it makes none.

        By default clients make one if it is evaluated and the rounds do not yield it.
        """
        makes = self.evaluation.asked and self.run.settings.job.has_local_baseline
        return BaselineOrder() if makes else None

    def description(self) -> str:
        """Return the main settings in words, by default the title of the method."""
        return METHODS[self.run.settings.method].title

    def state(self) -> dict[str, Any]:
        """Return the state for the checkpoint; it holds JSON values only."""
        return self.result.state()

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the state that ``state`` returned."""
        self.result.restore(state)


@runtime_checkable
class FoldsSums(Protocol):
    """Strategy of a method whose row names ``summands``, for secure sums."""

    def fold_sums(self, server_round: int, sums: Sums, clients: list[int]) -> None:
        """Aggregate the sum of the replies of these clients, of which no single one is known.

        It decides as ``Method.fold`` does from the replies, up to rounding in their fixed point.
        """
