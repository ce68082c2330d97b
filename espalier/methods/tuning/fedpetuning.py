"""FedPETuning: settings. ``adapters/contract.py`` has the contracts."""

from typing import ClassVar, Literal

from pydantic import Field

from espalier.methods.tuning.adapters.row import averaging_row
from espalier.methods.tuning.adapters.settings import AdapterAveraging, folding_faults
from espalier.methods.tuning.adapters.summands import summands
from espalier.models.adapters import FACTORS
from espalier.settings.run import RunSettings
from espalier.settings.tables.federation import BY_COORDINATE, FederationSettings
from espalier.settings.tables.lora import LoraSettings


class FedPETuningSettings(AdapterAveraging):
    """Table ``[fedpetuning]`` (Zhang et al. 2023, "FedPETuning")."""

    FEDERATION: ClassVar[tuple[str, ...]] = (*AdapterAveraging.FEDERATION, "fleet", "secure-sum")
    PRUNES = False
    MECHANISM = "dp-sgd"

    aggregation: Literal["factors", "svd", "fedex", "ffa", "rolora"] = Field(
        "factors",
        description=(
            "`factors`: mean of A and mean of B, as in the paper; `svd`: best approximation of the"
            " mean of the updates B A; `fedex` (FedEx-LoRA): as `factors`, and what the mean of the"
            " updates B A has beyond it is folded into the base; `ffa` (FFA-LoRA): A keeps its"
            " initial values, and only B is trained and sent; `rolora` (RoLoRA): clients train and"
            " send B in odd rounds and A in even rounds. With `fedex`, `ffa` and `rolora` the mean"
            " is exactly that of the updates B A."
        ),
    )

    @property
    def sent_factors(self) -> tuple[str, ...]:
        """Factors that the server sends; clients make the others from the run's seed."""
        return ("lora_b",) if self.aggregation == "ffa" else FACTORS

    def trained_factors(self, server_round: int) -> tuple[str, ...]:
        """Return the factors that clients train and send in a round."""
        if self.aggregation == "rolora":
            return ("lora_b",) if server_round % 2 else ("lora_a",)
        return self.sent_factors

    def rank_folded_by(self, run: RunSettings) -> int:
        """Return by how much a round raises the rank of the updates folded into the base.

        The residual of k clients has the rank (k - 1) r.
        """
        if self.aggregation != "fedex":
            return 0
        return (run.federation.clients_of_round(run.num_clients) - 1) * run.lora.rank

    def contradictions(
        self, method: str, federation: FederationSettings, lora: LoraSettings, num_clients: int
    ) -> list[str]:
        """Return one error line per conflict between these tables."""
        lines = super().contradictions(method, federation, lora, num_clients)
        if self.aggregation == "fedex":
            setting = "fedpetuning.aggregation = 'fedex'"
            lines += folding_faults(setting, federation, lora)
            if federation.aggregation_rule in BY_COORDINATE:
                lines.append(
                    f"federation.aggregation-rule = '{federation.aggregation_rule}': {setting}"
                    " averages the updates B A, and their coordinates are those of the dense"
                    " matrix, which the server never computes; set the rule to 'clipped-mean'"
                )
        return lines

    @property
    def averages_updates(self) -> bool:
        """True if the updates B A are averaged, and not A and B separately."""
        return self.aggregation == "svd"

    @property
    def averaged(self) -> str:
        """Word for what is averaged, for a run's description."""
        texts = {
            "fedex": "factors, with the residual of the updates,",
            "ffa": "only B trained and",
            "rolora": "B and A trained in turn and",
        }
        return texts.get(self.aggregation, super().averaged)

    def secure_sum_fault(self, federation: FederationSettings) -> str:
        """Return which settings need single replies; empty if none do."""
        if self.aggregation in ("svd", "fedex"):
            return (
                f"fedpetuning.aggregation = '{self.aggregation}' averages the products B A, which"
                " do not follow from the sums of A and of B; set it to 'factors', 'ffa' or 'rolora'"
            )
        return super().secure_sum_fault(federation)


METHOD = averaging_row(
    title="FedPETuning (federated averaging of LoRA adapters)",
    settings=FedPETuningSettings,
    strategy="strategies.tuning.fedpetuning:FedPETuning",
    job="client_app.methods.tuning.fedpetuning",
    summands=summands,
    to_summands="client_app.summands.adapters:of_adapters",
)
