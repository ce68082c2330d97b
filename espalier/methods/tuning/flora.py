"""FLoRA: settings.

Clients train new adapters in every round. What they send is stacked, and folded into the base.
"""

from typing import ClassVar

from espalier.methods.tuning.adapters.row import averaging_row
from espalier.methods.tuning.adapters.settings import AdapterAveraging, folding_faults
from espalier.models.adapters import FACTORS
from espalier.seeds import derive_seed
from espalier.settings.method import of_client
from espalier.settings.run import RunSettings
from espalier.settings.tables.federation import FederationSettings
from espalier.settings.tables.lora import LoraSettings, Ranks, largest_rank_faults, ranks_field


class FloraSettings(AdapterAveraging):
    """Table ``[flora]``.

    Source: Wang et al. 2024, "FLoRA: Federated Fine-Tuning Large Language Models with Heterogeneous
    Low-Rank Adaptations".
    """

    FEDERATION: ClassVar[tuple[str, ...]] = (
        "rounds", "sampled-clients", "client-weights", "max-weight-ratio", "aggregation-rule",
        "max-update-ratio", "fleet",
    )  # fmt: skip
    RULES: ClassVar[tuple[str, ...]] = ("clipped-mean", "mean")
    WHY_NO_OTHER_RULE = (
        "it averages the updates B A, and their coordinates are those of the dense matrix, which"
        " the server never computes"
    )
    PRUNES = False

    ranks: Ranks = ranks_field()

    @property
    def averaged(self) -> str:
        """Word for what is averaged, for a run's description."""
        return "updates stacked and"

    @property
    def sent_factors(self) -> tuple[str, ...]:
        """Factors that the server sends: none, because clients make new adapters in each round."""
        return ()

    def trained_factors(self, server_round: int) -> tuple[str, ...]:
        """Return both factors, which clients train and send in every round."""
        return FACTORS

    def adapter_seed(self, seed: int, server_round: int) -> int:
        """Return the seed of the initial adapters of a round, which differ from round to round."""
        if server_round == 1:
            return seed
        return derive_seed(seed, "flora", server_round=server_round)

    def rank_folded_by(self, run: RunSettings) -> int:
        """Return by how much a round raises the rank of the updates folded into the base.

        It is the sum of the clients' ranks; with sampled clients, of the largest ones.
        """
        ranks = [self.rank_limit_of(client, run.lora) for client in range(run.num_clients)]
        num_clients = run.federation.clients_of_round(run.num_clients)
        return sum(sorted(ranks)[-num_clients:])

    def rank_limit_of(self, client: int, lora: LoraSettings) -> int:
        """Return the rank of a client's adapters."""
        return int(of_client(self.ranks, client)) if self.ranks else lora.rank

    def contradictions(
        self, method: str, federation: FederationSettings, lora: LoraSettings, num_clients: int
    ) -> list[str]:
        """Return one error line per conflict between these tables."""
        return [
            *super().contradictions(method, federation, lora, num_clients),
            *folding_faults("method = 'flora'", federation, lora),
            *largest_rank_faults(self.ranks, lora, num_clients),
        ]


METHOD = averaging_row(
    title="FLoRA (LoRA adapters of any rank are stacked, and folded into the base)",
    settings=FloraSettings,
    strategy="strategies.tuning.flora:Flora",
    summands_reason="stacks the clients' adapters, which do not follow from their sum",
)
