"""Bytes of a run on the wire, per client and round and in total."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import torch

from espalier.hf.opening.opened_model import OpenedModel
from espalier.messages.message import Kind
from espalier.settings.registry import METHODS, part
from espalier.settings.run import RunSettings
from espalier.settings.tables.task import TEXT
from server_app.estimate.messages.dry_run import Case, DryRun, Exchange
from server_app.public_tests import PublicTests

USUAL_SAMPLES = 48
"""Assumed number of sequences of a text that was not read and has no limit."""


@dataclass(frozen=True)
class Traffic:
    """Sums over exchanges."""

    down: int = 0
    up: int = 0
    messages: int = 0
    """Number of requests; each has a reply."""
    largest_request: int = 0
    """Bytes of the largest request."""
    largest_reply: int = 0

    @property
    def num_bytes(self) -> int:
        """Bytes in both directions."""
        return self.down + self.up

    @property
    def largest(self) -> int:
        """Bytes of the largest single message."""
        return max(self.largest_request, self.largest_reply)

    @staticmethod
    def of(exchanges: Iterable[Exchange]) -> "Traffic":
        """Return the sums over the given exchanges."""
        all_exchanges = list(exchanges)
        downs = [exchange.down for exchange in all_exchanges]
        ups = [exchange.up for exchange in all_exchanges]
        return Traffic(
            sum(downs), sum(ups), len(all_exchanges), max(downs, default=0), max(ups, default=0)
        )


@dataclass(frozen=True)
class RunTraffic:
    """Messages of a run, with the fewest and with the most bytes."""

    settings: RunSettings
    model: OpenedModel
    tests: PublicTests

    @cached_property
    def _kind(self) -> type[DryRun]:
        row = METHODS[self.settings.method]
        # The dry run comes first, so that its members replace those of the strategy.
        bases = (part(row.dry_run), part(row.strategy))
        return cast(type[DryRun], type("DryMethod", bases, {}))

    @cached_property
    def open_questions(self) -> str:
        """Description of what the size depends on apart from the settings; may be empty."""
        return self._kind.open_questions(self.settings)

    @cached_property
    def strategy(self) -> DryRun:
        """Strategy after a run with the most bytes."""
        return self._kind(self.settings, self.model, self.tests)

    @cached_property
    def _least(self) -> DryRun:
        # Without open questions both cases are the same run.
        if not self.open_questions:
            return self.strategy
        return self._kind(self.settings, self.model, self.tests, "least")

    def exchanges(self, case: Case = "most") -> Mapping[int, Sequence[Exchange]]:
        """Return the messages of each client in order, without its enrolment."""
        return (self._least if case == "least" else self.strategy).exchanges

    def of_client(self, client: int, case: Case = "most") -> Traffic:
        """Return the sums of a client."""
        return Traffic.of(self.exchanges(case)[client])

    def total(self, case: Case = "most") -> Traffic:
        """Return the sums over all clients."""
        return Traffic.of(
            exchange for exchanges in self.exchanges(case).values() for exchange in exchanges
        )

    def by_kind(self, client: int, case: Case = "most") -> dict[tuple[int, Kind], Traffic]:
        """Return the sums of a client by round and kind of message, in order."""
        groups: dict[tuple[int, Kind], list[Exchange]] = {}
        for exchange in self.exchanges(case)[client]:
            groups.setdefault((exchange.server_round, exchange.kind), []).append(exchange)
        return {key: Traffic.of(exchanges) for key, exchanges in groups.items()}


def unread_tests(settings: RunSettings, model: OpenedModel) -> PublicTests:
    """Return evaluation texts of the expected shapes; without the tokenizer they are not read."""
    chosen = settings.evaluation
    if settings.task.name != TEXT or model.family.kind == "encoder":
        return PublicTests({})
    shape = (chosen.max_samples or USUAL_SAMPLES, chosen.sequence_length)
    return PublicTests({name: torch.zeros(shape).long() for name in chosen.named_texts()})
