"""Bytes of a run on the wire, per client and round and in total, and its estimated time.

A client's time is its operations divided by its speed, plus its bytes divided by its bandwidth.
Clients of a deployment work at the same time. Work of the server, process starts, reading and
tokenization are not included.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import cast

from espalier.hf.opening.opened import OpenedModel
from espalier.messages.evaluation import Texts
from espalier.messages.message import Kind
from espalier.settings.methods import METHODS, part
from espalier.settings.run import RunSettings
from espalier.settings.task import TEXT
from server_app.estimate.dry_runs.dry_run import CASES, Case, DryRun
from server_app.estimate.exchange import Exchange, Traffic
from server_app.public_tests import PublicTests
from strategies.base.evaluation import asked_texts

USUAL_SAMPLES = 48
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
    def _kind(self) -> type[DryRun]:
        row = METHODS[self.settings.method]
        strategy = part(row.strategy)
        return cast(
            type[DryRun], type(f"Dry{strategy.__name__}", (part(row.dry_run), strategy), {})
        )

    @cached_property
    def open_questions(self) -> str:
        """Description of what the size depends on apart from the settings; may be empty."""
        return self._kind.open_questions(self.settings)

    @cached_property
    def cases(self) -> Mapping[Case, DryRun]:
        """Dry run of each case; the same object if the size depends on the settings only."""
        if self.open_questions:
            return {case: self._kind(self.settings, self.model, self.texts, case) for case in CASES}
        return dict.fromkeys(CASES, self._kind(self.settings, self.model, self.texts))

    @property
    def strategy(self) -> DryRun:
        """Strategy of the usual case, after its run."""
        return self.cases["usual"]

    def exchanges(self, client: int, case: Case = "usual") -> Sequence[Exchange]:
        """Return all messages of a client in order, without its enrolment."""
        return self.cases[case].exchanges[client]

    def of_client(self, client: int, case: Case = "usual") -> Traffic:
        """Return the sums of a client."""
        return Traffic.of(self.exchanges(client, case))

    def total(self, case: Case = "usual") -> Traffic:
        """Return the sums over all clients."""
        return Traffic.of(one for own in self.cases[case].exchanges.values() for one in own)

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
    evaluates = settings.evaluation.local_baseline
    if tests is not None:
        numbers = {
            name: len(num_samples) for name, num_samples in tests.of_clients(settings).items()
        }
        items = (tests.encoded, tests.metrics) if tests.encoded and evaluates else None
        return asked_texts(settings, numbers, items)
    chosen = settings.evaluation
    on_text = evaluates and settings.task.name == TEXT and not encoder
    texts = chosen.named_texts() if on_text else {}
    numbers = dict.fromkeys(texts, chosen.max_samples or USUAL_SAMPLES)
    return asked_texts(settings, numbers, None)


TERA = 1e12
MEGA = 1e6
STATED_TERAFLOPS = 0.05
STATED_MEGABITS = 100.0
"""Default speeds without other information: two cores of a laptop, and a home connection."""


@dataclass(frozen=True)
class Speeds:
    """Speed of a client."""

    teraflops: float = STATED_TERAFLOPS
    """Additions and multiplications per second, in 10^12."""
    megabits: float = STATED_MEGABITS
    """Bandwidth in each direction, in 10^6 bits per second."""
    measured: bool = False
    """True if ``teraflops`` were measured on this machine."""


def seconds(operations: float, num_bytes: int, speeds: Speeds) -> float:
    """Return the time for this amount of work and traffic, in seconds."""
    return operations / (speeds.teraflops * TERA) + 8 * num_bytes / (speeds.megabits * MEGA)
