"""Base class of all methods: the questions that ``Federation`` asks in the course of a run.

A method overrides what differs from other methods. What methods share is in objects that they
have, such as ``AdapterAverager``; ``Tuning`` asks it by default. No method derives from another.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from espalier.hf.opening.opened import OpenedModel
from espalier.messages.contracts import contract_for
from espalier.messages.local_baseline import Alone
from espalier.messages.message import Fields, NoFields
from espalier.messages.parts import PartRequest
from espalier.messages.records import read
from espalier.settings.methods import METHODS
from espalier.settings.run import RunSettings
from strategies.base.evaluation import ClientEvaluation
from strategies.base.inbox import Inbox
from strategies.base.roster import Seat
from strategies.base.run import Run


class Saved(Protocol):
    """Object with state in the checkpoint."""

    def state(self) -> dict[str, Any]:
        """Return the state for the checkpoint; it holds JSON values only."""

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the state that ``state`` returned."""


class RunResult(Saved, Protocol):
    """Result of the rounds so far.

    Large data are stored as blobs of the checkpoint; the result names them by their hash.
    """

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
    """Request to a client in a round, and the form of its reply."""

    fields: Fields
    """Fields of ``train``."""
    parts: Sequence[Sequence[str]]
    """Blob keys of each part in which the reply is sent."""
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


class Method(ABC):
    """One method: what the server decides, sends and aggregates.

    A round has these steps. The server prepares it (``before_round``); its decisions are in the
    checkpoint before a message is sent. Clients receive what they need (``prepare``) and their
    orders (``order``); replies arrive part by part. Clients that lost their state catch up once
    (``catch_up``). Complete replies without a fault (``fault_of``) are aggregated (``fold``). The
    checkpoint (``state``) ends the round.

    Parameters
    ----------
    run : settings, base model, device, message exchange and run folder
    evaluation : evaluation by the clients after the last round
    """

    WORDS = ProgressWords()
    result: RunResult
    """Result of the rounds."""

    def __init__(self, run: Run, evaluation: ClientEvaluation) -> None:
        self.run = run
        self.rounds = run.rounds
        self.evaluation = evaluation
        self.saved: list[Saved] = []
        """Objects whose state is in the checkpoint in addition to that of ``result``."""

    @classmethod
    def require_fit(
        cls, settings: RunSettings, model: OpenedModel, capabilities: Mapping[str, float]
    ) -> None:
        """Refuse a run that is impossible with this model, before anything is started.

        Parameters
        ----------
        settings : settings of the run
        model : opened base model
        capabilities : known capabilities by client name: all in a simulation, none in a deployment

        Raises
        ------
        InputError
            The run is impossible; the message says why.
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

        Returns
        -------
        bool
            True if a checkpoint must be written before messages are sent. After it, a resumed run
            does not call this function for the round again.
        """
        return False

    def prepare(self, server_round: int, save: Callable[[], None]) -> Selection | None:
        """Push to the clients what they need for a round, and select the clients that it asks.

        Parameters
        ----------
        server_round : number of the round
        save : function that writes a checkpoint, for what clients have received so far

        Returns
        -------
        Selection or None
            None: all clients that still take part.
        """
        return None

    def order(self, server_round: int, client: int) -> ClientOrder:
        """Return the order of a client in a round, and the parts of its reply.

        By default it is an order without content, with the parts of its contract.
        """
        run = self.run
        seat = self.rounds.roster.seats[client]
        order = read(self.rounds.request("train", seat, server_round, NoFields()).content)
        contract = contract_for(order, lambda: run.model.plan, run.settings)
        return ClientOrder(NoFields(), contract.parts)

    def catch_up(self, server_round: int) -> Callable[[Sequence[int]], None] | None:
        """Return a function that pushes to clients the state that they lost.

        Returns
        -------
        callable or None
            None: a client that has lost state of this round cannot receive it again.
        """
        return None

    def note_report(self, seat: Seat, report: Mapping[str, Any]) -> None:
        """Record parts of a client's report on its seat, for the summary and for ``fold``."""
        return

    def fault_of(self, inbox: Inbox, client: int) -> str | None:
        """Return why a client's complete reply is not plausible; None if it is.

        The client is dropped with this reason.
        """
        return None

    @abstractmethod
    def fold(self, server_round: int, inbox: Inbox, clients: list[int]) -> None:
        """Aggregate the replies of these clients, in client order."""

    def deliver(self, server_round: int) -> None:
        """Push the result to the clients after the last round, if they need it."""
        return

    def local_baseline_request(self, seat: Seat) -> Alone | None:
        """Return the order for a client's local baseline; None if it makes none.

        By default clients make one if it is evaluated and the rounds do not yield it.
        """
        makes = self.evaluation.asked and self.run.settings.job.has_local_baseline
        return Alone() if makes else None

    def summary(self) -> None:
        """Show the method and its main settings, by default its title."""
        method = self.run.settings.method
        self.run.progress.note("method", f"{method:<12} {METHODS[method].title}")

    def state(self) -> dict[str, Any]:
        """Return the state for the checkpoint; it holds JSON values only."""
        states = [one.state() for one in (self.result, *self.saved)]
        return {key: value for state in states for key, value in state.items()}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the state that ``state`` returned."""
        for one in (*self.saved, self.result):
            one.restore(state)
