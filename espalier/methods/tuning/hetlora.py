"""HetLoRA: settings.

LoRA adapters are averaged, with a rank for each client.
"""

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field

from espalier.methods.tuning.adapters.row import averaging_row
from espalier.methods.tuning.adapters.settings import AdapterAveraging
from espalier.settings.method import of_client
from espalier.settings.tables.federation import FederationSettings
from espalier.settings.tables.lora import LoraSettings, Ranks, largest_rank_faults, ranks_field
from espalier.settings.tables.training import MAX_PULL


class HetLoRASettings(AdapterAveraging):
    """Table ``[hetlora]``.

    Source: Cho et al. 2024, "Heterogeneous LoRA for Federated Fine-tuning of On-Device Foundation
    Models".
    """

    FEDERATION: ClassVar[tuple[str, ...]] = (
        "rounds", "sampled-clients", "client-weights", "max-weight-ratio", "aggregation-rule",
        "max-update-ratio", "wire-dtype", "fleet",
    )  # fmt: skip
    WEIGHTS: ClassVar[tuple[str, ...]] = ("norms", "samples", "equal")
    RULES: ClassVar[tuple[str, ...]] = ("clipped-mean", "mean")
    WHY_NO_OTHER_RULE = (
        "clients have different ranks, so that a coordinate of the higher ranks is a number of a"
        " few clients and zero at the others, and a median would be zero"
    )
    READ_ANYWAY: ClassVar[Mapping[tuple[str, str], tuple[str, str]]] = {
        # A client that holds a rank with few others has a large share of it, whatever its weight.
        ("federation.max-weight-ratio", "federation.client-weights"): (
            "hetlora.rank-weights", "holders",
        ),
    }  # fmt: skip
    PRUNES = False

    ranks: Ranks = ranks_field()
    aggregation: Literal["zero-pad", "svd"] = Field(
        "zero-pad",
        description=(
            "`zero-pad`: means of A and B padded with zeros, as in the paper; `svd`: best"
            " approximation of the mean of the updates B A, of which each client gets the best one"
            " of its rank."
        ),
    )
    rank_weights: Literal["all", "holders"] = Field(
        "all",
        description=(
            "Clients among which each rank is averaged. `all`: clients of lower ranks count as"
            " zero, as in the paper; `holders` (raFLoRA): only the clients that have the rank, so"
            " that high ranks do not fade. A rank that no client of the round has stays as it is."
        ),
    )
    gamma: float = Field(
        0.85,
        gt=0,
        le=1,
        description=(
            "Self-pruning: fraction of its ranks that a client keeps if training has made its last"
            " ranks weaker; 1: no self-pruning."
        ),
    )
    regularisation: float = Field(
        0.005,
        ge=0,
        le=MAX_PULL,
        description=(
            "Self-pruning: weight in the training loss of the penalty on the ranks that may be"
            " pruned."
        ),
    )

    @property
    def averages_updates(self) -> bool:
        """True if the updates B A are averaged, and not A and B separately."""
        return self.aggregation == "svd"

    @property
    def own_weights(self) -> str:
        """Value of ``federation.client-weights`` for which ``auto`` stands, by the paper."""
        return "samples" if self.rank_weights == "holders" else super().own_weights

    def rank_limit_of(self, client: int, lora: LoraSettings) -> int:
        """Return the rank with which a client begins.

        Without ``ranks`` it depends on the client's capability, which only the server knows; the
        result is then the largest rank.
        """
        return int(of_client(self.ranks, client)) if self.ranks else lora.rank

    @property
    def lowers_ranks(self) -> bool:
        """True if a client may continue with a lower rank than the server asked for."""
        return self.gamma < 1

    def contradictions(
        self, method: str, federation: FederationSettings, lora: LoraSettings, num_clients: int
    ) -> list[str]:
        """Return one error line per conflict between these tables.

        In addition to those of all averaging methods: if no client has the largest rank, its last
        components would stay untrained.
        """
        return [
            *super().contradictions(method, federation, lora, num_clients),
            *largest_rank_faults(self.ranks, lora, num_clients),
        ]


METHOD = averaging_row(
    title="HetLoRA (federated LoRA adapters, with a rank for each client)",
    settings=HetLoRASettings,
    strategy="strategies.tuning.hetlora:HetLoRA",
    job="client_app.methods.tuning.hetlora",
    summands_reason=(
        "needs each client's adapters by themselves: clients have ranks of their own and give some"
        " up, and the norm of each one's update can be its weight"
    ),
    dry_run="server_app.estimate.messages.tuning:DryHetLoRA",
)
