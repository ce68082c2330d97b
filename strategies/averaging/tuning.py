"""Base class of the methods that train adapters and average them."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from espalier.amounts import count
from espalier.hf.nf4.matrices import require_quantisable
from espalier.hf.opening.opened import OpenedModel
from espalier.messages.message import MessageBody
from espalier.methods.fedpetuning import trained
from espalier.settings.run import RunSettings
from strategies.averaging.adapter_averager import AdapterAverager
from strategies.averaging.adapters import AdapterResult
from strategies.base.inbox import Inbox
from strategies.base.method import ClientOrder, Method, ProgressWords, Selection
from strategies.base.roster import Seat
from strategies.fleet import fleet_of_run


class Tuning(Method):
    """Base class of methods that train adapters and average them.

    The members of ``Method`` that are defined here call ``averager``; a method overrides the ones
    in which it differs. The parameters are those of ``Method``.
    """

    WORDS = ProgressWords("adapters", "training", "trained")
    RESULT: ClassVar[type[Any]] = AdapterResult
    """Class of the result."""
    averager: AdapterAverager
    """Averaging of the run's adapters; a subclass makes it."""

    @classmethod
    def require_fit(
        cls, settings: RunSettings, model: OpenedModel, capabilities: Mapping[str, float]
    ) -> None:
        """Refuse adapters or NF4 that the model does not allow, and an unknown fleet."""
        # The value ``auto`` is checked later, because it depends on whether the run is a simulation.
        fleet_of_run(settings, simulation=False)
        trained(model.plan, settings)
        if settings.training.base == "nf4":
            require_quantisable(model.plan)

    def description(self) -> str:
        """Return the main settings in words."""
        settings = self.run.settings
        lora = settings.lora
        training = settings.training
        size = self.averager.adapters().adapters.num_parameters
        averaged = "updates" if self.averager.job.averages_updates else "factors"
        return (
            f"rank {lora.rank} on {lora.targets}, {size:,} parameters, {averaged} averaged,"
            f" {count(training.steps, 'step')} a round, base {training.base}"
        )

    def prepare(self, server_round: int, save: Callable[[], None]) -> Selection:
        """Select the round's clients, and push the global adapters to them."""
        return self.averager.prepare(server_round, self.averager.draw(server_round))

    def order(self, server_round: int, client: int) -> ClientOrder:
        """Return the order to train the global adapters."""
        return self.averager.order(server_round, client)

    def note_part(self, seat: Seat, body: MessageBody) -> None:
        """Record rank, skipped steps, number of samples, and values out of reach of training."""
        self.averager.note_part(seat, body)

    def fault_of(self, inbox: Inbox, client: int) -> str | None:
        """Return the first tensor with values that training cannot have reached, and why."""
        return self.averager.fault_of(client)

    def fold(self, server_round: int, inbox: Inbox, clients: list[int]) -> None:
        """Average the adapters blob by blob, in client order."""
        averager = self.averager
        updates = averager.updates(server_round, inbox, clients)
        averager.note_times(server_round, updates.clients)
        weights = averager.samples_of(updates.clients)
        averager.average(updates, weights, averager.limits_after(server_round))

    def state(self) -> dict[str, Any]:
        """Return the state of result and averager."""
        return super().state() | self.averager.state()

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the state that ``state`` returned."""
        self.averager.restore(state)
        super().restore(state)

    def deliver(self, server_round: int) -> None:
        """Push the result to the clients after the last round, if they need it."""
        self.averager.deliver(server_round)
