"""SFT-P: structural masks per client, trained together with LoRA.

Clients train a shared mask generator and LoRA, and each client a private embedding, which stays at
the client. The server averages generator and LoRA (algorithm 1, equation 15). After the last round
every client builds its own smaller dense model from the result, within its own budget.
"""

from collections.abc import Mapping
from typing import Any

from espalier.errors import EspalierError, InputError
from espalier.hf.opening.opened import OpenedModel, check_labels
from espalier.hf.structured.residual_gates import ResidualGates
from espalier.messages.local_baseline import Alone
from espalier.methods.sft_p.contract import shape_of, trained
from espalier.methods.sft_p.settings import SftPSettings
from espalier.models.mask_generator import PREFIX, num_parameters
from espalier.settings.run import RunSettings
from espalier.training.sft_p.masked_training import first_shared, of_generator
from strategies.averaging.training_bound import Reach
from strategies.base.evaluation import ClientEvaluation
from strategies.base.roster import Seat
from strategies.base.run import Run
from strategies.fedpetuning.adapters import AdapterResult
from strategies.fedpetuning.strategy import FedPETuning


class SftP(FedPETuning):
    """FedPETuning of a mask generator and LoRA.

    The parameters are those of ``FedPETuning``.
    """

    job: SftPSettings

    def __init__(self, run: Run, evaluation: ClientEvaluation | None = None) -> None:
        super().__init__(run, evaluation)
        settings = of_generator((), run.settings).settings(run.settings.training)
        self.reach_of_generator = Reach(settings, differences=self.federation.sends_differences)
        # The names of their tensors differ, so both share one dictionary, which goes to the
        # checkpoint.
        self.reach_of_generator.starts = self.reach.starts

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the state that ``state`` returned."""
        super().restore(state)
        self.reach_of_generator.starts = self.reach.starts

    def new_result(self) -> AdapterResult:
        """Return generator and LoRA before the first round."""
        run = self.run
        plan = self.run.model.plan
        first = first_shared(plan, run.settings)
        return AdapterResult(
            run.settings, run.model, run.checkpoint.blobs, trained(plan, run.settings), first
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
        model.require_groups()
        job = settings.of(SftPSettings)
        method = settings.method
        try:
            of_generator((), settings).settings(settings.training)
        except EspalierError as error:
            raise InputError(f"{method}.learning-rate, {method}.weight-decay: {error}") from None
        if not model.family.residual_prunable:
            family = model.family.name
            raise InputError(
                f"method = '{method}': models of the family {family} have no residual dimensions"
                " that can be removed; name one like LLaMA"
            )
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
        for client in range(settings.num_clients):
            try:
                ResidualGates(model.plan).target(job.share_of_client(client), job.share_of)
            except EspalierError as error:
                raise InputError(f"{method}.{error}") from None

    def summary(self) -> None:
        """Show the method and its main settings."""
        job = self.job
        settings = self.run.settings
        size = num_parameters(shape_of(settings).shapes(self.run.model.plan))
        lora = f"LoRA of rank {settings.lora.rank}" if job.adapters else "no LoRA"
        shares = job.shares or f"{job.share:g}"
        who = "each client's own" if job.conditioned else "one for all"
        text = f"shares {shares} pruned, masks {who}, a generator of {size:,} parameters, {lora}"
        self.run.progress.note("method", f"{settings.method:<12} {text}")

    def seats_of_rounds(self) -> list[Seat]:
        """Return the active clients without late ones, which join only after the rounds."""
        return [seat for seat in super().seats_of_rounds() if not self._is_late(seat)]

    def quorum_of(self) -> int | None:
        """Return the number of clients that are not late, if some are."""
        drawn = super().quorum_of()
        return (
            self.run.settings.num_clients - self.job.late_clients
            if drawn is None and self.job.late_clients
            else drawn
        )

    @property
    def lets_work_alone(self) -> bool:
        """True if clients write their models, even if nobody evaluates them."""
        return self.job.makes_alone

    def alone_order(self, seat: Seat) -> Alone | None:
        """Return the order to write the client's model.

        A client without a round in the run trains its embedding first.
        """
        fits = not seat.rounds and self.job.fits_alone(self.federation)
        return Alone(fits=fits) if self.job.keep_models or fits else None

    def _is_late(self, seat: Seat) -> bool:
        return self.job.is_late(seat.client, len(self.rounds.roster.seats))

    @property
    def brings_result(self) -> bool:
        """True if clients need the result for their own models."""
        return self.evaluation.asked or self.lets_work_alone

    def reach_of(self, name: str) -> Reach:
        """Return the limits; the generator's differ, because it has its own learning rate."""
        return self.reach_of_generator if name.startswith(PREFIX) else self.reach
