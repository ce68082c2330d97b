"""Bytes of a run on the wire: per client and round, and in total."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from espalier.data.tasks.scored_items import to_arrays
from espalier.hf.opening.opened import OpenedModel
from espalier.messages.evaluation import Texts
from espalier.messages.message import Kind
from espalier.settings.methods import METHODS, part
from espalier.settings.run import RunSettings
from espalier.settings.task import TEXT
from server_app.estimate.exchange import Exchange, Traffic
from server_app.estimate.messages.base import CASES, Case, Messages
from server_app.public_tests import PublicTests

USUAL_WINDOWS = 48
"""Assumed number of sequences of an evaluation text without limit that was not read yet."""


@dataclass(frozen=True)
class RunTraffic:
    """Messages of a run, for each case.

    Parameters
    ----------
    texts : request of the evaluation at clients
    """

    settings: RunSettings
    model: OpenedModel
    texts: Texts

    @cached_property
    def _kind(self) -> type[Messages]:
        found: type[Messages] = part(METHODS[self.settings.method].messages)
        return found

    @cached_property
    def open_questions(self) -> str:
        """Description of what the size depends on apart from the settings; may be empty."""
        return self._kind.differs(self.settings)

    @cached_property
    def cases(self) -> Mapping[Case, Messages]:
        """Messages in each case; the same object if the size depends on the settings only."""
        kind = self._kind
        if self.open_questions:
            return {case: kind(self.settings, self.model, self.texts, case) for case in CASES}
        return dict.fromkeys(CASES, kind(self.settings, self.model, self.texts, "usual"))

    def exchanges(self, client: int, case: Case = "usual") -> Sequence[Exchange]:
        """Return all messages of a client in order, without its enrolment."""
        return self._of_all[case][client]

    @cached_property
    def _of_all(self) -> Mapping[Case, Sequence[Sequence[Exchange]]]:
        clients = range(self.settings.num_clients)
        # Cases may be the same object, whose messages are then generated once.
        found = {
            id(one): [list(one.of_client(client)) for client in clients]
            for one in self.cases.values()
        }
        return {case: found[id(one)] for case, one in self.cases.items()}

    def of_client(self, client: int, case: Case = "usual") -> Traffic:
        """Return the sums of a client."""
        return Traffic.of(self.exchanges(client, case))

    def total(self, case: Case = "usual") -> Traffic:
        """Return the sums over all clients."""
        return Traffic.of(
            one
            for client in range(self.settings.num_clients)
            for one in self.exchanges(client, case)
        )

    def by_kind(self, client: int, case: Case = "usual") -> dict[tuple[int, Kind], Traffic]:
        """Return the sums of a client by round and kind of message, in order."""
        found: dict[tuple[int, Kind], list[Exchange]] = {}
        for one in self.exchanges(client, case):
            found.setdefault((one.server_round, one.kind), []).append(one)
        return {key: Traffic.of(several) for key, several in found.items()}


def asked_of(settings: RunSettings, tests: PublicTests | None, encoder: bool) -> Texts:
    """Return the request of the evaluation at clients.

    Without ``tests`` it follows from the settings.
    """
    chosen = settings.evaluation
    texts = dict[str, int]()
    on_text = settings.clients_evaluate and settings.task.name == TEXT
    if tests is not None:
        texts = {name: len(windows) for name, windows in tests.of_clients(settings).items()}
    elif on_text and not encoder:
        texts = dict.fromkeys(chosen.named_texts(), chosen.max_windows or USUAL_WINDOWS)
    asked = Texts(
        names=list(texts),
        num_windows=list(texts.values()),
        window_tokens=chosen.window_tokens,
        own_text=chosen.own_text,
    )
    if tests is not None and tests.encoded and settings.clients_evaluate:
        asked.test_metrics = list(tests.metrics)
        asked.test_items = len(tests.encoded)
        asked.test_requests = len(tests.encoded.requests)
        asked.test_tokens = len(to_arrays(tests.encoded)["tokens"])
    return asked
