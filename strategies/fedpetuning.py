"""FedPETuning (Zhang et al. 2023): federated averaging of LoRA adapters.

The paper averages the factors A and B, which is not the same as averaging the updates B A. With
``aggregation = "svd"`` the updates are averaged, and the best approximation with the adapters' rank
is kept.
"""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from espalier.amounts import count
from espalier.hf.opening.opened import OpenedModel
from espalier.settings.run import RunSettings
from strategies.averaging.adapter_averager import TUNING, AdapterAverager, require_adapters
from strategies.averaging.adapters import AdapterResult
from strategies.base.evaluation import ClientEvaluation
from strategies.base.inbox import Inbox
from strategies.base.method import ClientOrder, Method, Selection
from strategies.base.roster import Seat
from strategies.base.run import Run


class FedPETuning(Method):
    """Strategy of FedPETuning: federated averaging of adapters.

    The parameters are those of ``Method``.
    """

    WORDS = TUNING
    RESULT: ClassVar[type[AdapterResult]] = AdapterResult
    """Class of the result."""

    result: AdapterResult

    def __init__(self, run: Run, evaluation: ClientEvaluation) -> None:
        super().__init__(run, evaluation)
        self.result = self.RESULT(run.settings, run.model, run.checkpoint.blobs)
        self.averager = AdapterAverager(
            run, lambda: self.result, brings_result=run.settings.evaluation.own_text
        )
        self.saved.append(self.averager)

    @classmethod
    def require_fit(
        cls, settings: RunSettings, model: OpenedModel, capabilities: Mapping[str, float]
    ) -> None:
        """Refuse adapters or NF4 that the model does not allow, and an unknown fleet."""
        require_adapters(settings, model)

    def summary(self) -> None:
        """Show the method and its main settings."""
        show_averaging(self.run, self.result)

    def prepare(self, server_round: int, save: Callable[[], None]) -> Selection:
        """Select the round's clients, and push the global adapters to them."""
        return self.averager.prepare(server_round, self.averager.draw(server_round))

    def order(self, server_round: int, client: int) -> ClientOrder:
        """Return the order to train the global adapters."""
        return self.averager.order(server_round, client)

    def note_report(self, seat: Seat, report: Mapping[str, Any]) -> None:
        """Record rank, skipped steps and, with weights by samples, their number."""
        self.averager.note_report(seat, report)

    def fault_of(self, inbox: Inbox, client: int) -> str | None:
        """Return a tensor with numbers to which training cannot have led, and why."""
        return self.averager.fault_of(inbox, client)

    def fold(self, server_round: int, inbox: Inbox, clients: list[int]) -> None:
        """Average the adapters blob by blob, in client order."""
        averager = self.averager
        updates = averager.updates(server_round, inbox, clients)
        averager.note_times(server_round, updates.clients)
        weights = averager.samples_of(updates.clients)
        averager.average(updates, weights, averager.limits_after(server_round))

    def deliver(self, server_round: int) -> None:
        """Push the result to the clients for the evaluation on their own text."""
        self.averager.deliver(server_round)


def show_averaging(run: Run, result: AdapterResult) -> None:
    """Show the method and the main settings of adapters and training."""
    lora = run.settings.lora
    training = run.settings.training
    averaged = "updates" if result.job.averages_updates else "factors"
    text = (
        f"rank {lora.rank} on {lora.targets}, {result.adapters.num_parameters:,} parameters,"
        f" {averaged} averaged, {count(training.steps, 'step')} a round, base {training.base}"
    )
    run.progress.note("method", f"{run.settings.method:<12} {text}")
