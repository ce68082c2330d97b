"""SFT-P: structural masks per client, trained together with LoRA.

Clients train a shared mask generator and LoRA, and each client a private embedding, which stays at
the client. The server averages generator and LoRA (algorithm 1, equation 15). After the last round
every client builds its own smaller dense model from the result, within its own budget.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from espalier.errors import EspalierError, InputError
from espalier.hf.opening.opened_model import OpenedModel, check_labels
from espalier.hf.structured.residual_gates import ResidualGates
from espalier.messages.local_baseline import BaselineOrder
from espalier.methods.tuning.sft_p import SftPSettings, shape_of, trained
from espalier.models.mask_generator import PREFIX, num_parameters
from espalier.settings.run import RunSettings
from espalier.training.masked_training import first_shared, of_generator
from strategies.averaging.adapter_averager import Tuning
from strategies.averaging.adapters import AdapterResult
from strategies.base.evaluation import ClientEvaluation
from strategies.base.method import Selection
from strategies.base.roster import Seat
from strategies.base.run import Run


class SftP(Tuning):
    """Strategy of SFT-P: averaging of a mask generator and LoRA."""

    result: AdapterResult

    def __init__(self, run: Run, evaluation: ClientEvaluation) -> None:
        settings = run.settings
        plan = run.model.plan
        self.job = settings.of(SftPSettings)
        super().__init__(
            run,
            evaluation,
            trained(plan, settings),
            partial(first_shared, plan, settings),
            brings_result=evaluation.asked or self.job.has_local_baseline,
            training={PREFIX: of_generator((), settings).settings(settings.training)},
        )

    @classmethod
    def require_fit(
        cls, settings: RunSettings, model: OpenedModel, capabilities: Mapping[str, float]
    ) -> None:
        """Refuse an impossible run before it starts.

        Impossible are a family without residual dimensions to cut, an unreachable pruning ratio, a
        learning rate that is too high, and everything that FedPETuning refuses.
        """
        check_labels(model.family, None, str(model.directory / "config.json"))
        super().require_fit(settings, model, capabilities)
        job = settings.of(SftPSettings)
        method = settings.method
        try:
            of_generator((), settings).settings(settings.training)
        except EspalierError as error:
            # Settings of the generator have names of their own in the method's table.
            raise InputError(f"{method}.learning-rate, {method}.weight-decay: {error}") from None
        if not model.family.residual_prunable:
            family = model.family.name
            raise InputError(
                f"method = '{method}': models of the family {family} have no residual dimensions"
                " that can be removed; name one like LLaMA"
            )
        model.require_groups(heads=True)
        # Structures cannot mix norms over all dimensions with norms over what is read.
        if (
            model.structure is not None
            and model.structure.cuts_residual
            and (job.norm == "read" or model.structure.norm_of_read)
        ):
            raise InputError(
                f"{method}.norm = '{job.norm}': residual dimensions of the model were removed"
                " before, and norms that see only what is read cannot be cut again, or mixed with"
                " others; set it to all, or name the model that nothing was cut from"
            )
        # Every client has its own budget; each must be reachable.
        for client in range(settings.num_clients):
            ResidualGates(model.plan).target(job.pruning_ratio_of_client(client), job.ratio_of)

    def description(self) -> str:
        """Return the main settings in words."""
        job = self.job
        settings = self.run.settings
        size = num_parameters(shape_of(settings).shapes(self.run.model.plan))
        lora = f"LoRA of rank {settings.lora.rank}" if job.adapters else "no LoRA"
        shares = job.ratios or f"{job.pruning_ratio:g}"
        who = "each client's own" if job.conditioned else "one for all"
        return f"pruning ratios {shares}, masks {who}, a generator of {size:,} parameters, {lora}"

    def prepare(self, server_round: int, save: Callable[[], None]) -> Selection:
        """Select the round's clients, and push generator and LoRA to them.

        Late clients join only after the rounds.
        """
        roster = self.rounds.roster
        number = len(roster.seats)
        # Clients that come late have no part in the shared generator.
        on_time = [seat for seat in roster.active() if not self.job.is_late(seat.client, number)]
        limits = self.averager.draw(server_round, on_time)
        selection = self.averager.prepare(server_round, limits)
        # The quorum of a round counts the clients that could be asked.
        if selection.quorum_of is None and self.job.late_clients:
            number = self.run.settings.num_clients - self.job.late_clients
            return replace(selection, quorum_of=number)
        return selection

    def local_baseline_request(self, seat: Seat) -> BaselineOrder | None:
        """Return the order to write the client's model, even if nobody evaluates it.

        A client without a round in the run trains its embedding first.
        """
        # It has an untrained embedding otherwise.
        fits = not seat.rounds and self.job.fits_local_baseline(self.run.settings.federation)
        needed = self.job.has_local_baseline and (self.job.keep_models or fits)
        return BaselineOrder(fits=fits) if needed else None
