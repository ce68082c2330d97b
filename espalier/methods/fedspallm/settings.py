"""Settings of FedSpaLLM: pruning with l0 aggregation, mask expansion and layer sampling."""

from collections.abc import Callable
from typing import ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from espalier.settings.federation import FederationSettings
from espalier.settings.pruning import PruningSettings
from espalier.settings.table import ReadWith


class FedSpaLLMSettings(PruningSettings):
    """Table ``[fedspallm]``; terms are the paper's (section 4), a layer is a decoder block."""

    FEDERATION: ClassVar[tuple[str, ...]] = (
        "rounds", "client-weights", "max-weight-ratio", "max-update-ratio",
    )  # fmt: skip
    WEIGHTS: ClassVar[tuple[str, ...]] = ("equal", "samples")
    READ_WITH: ClassVar[ReadWith] = {
        "sparsity": {"pattern": ("",)},
        "damping-mean": {"local-method": ("sparsegpt",)},
        "federation.max-update-ratio": {"local-method": ("sparsegpt",)},
    }

    sparsity: float = Field(
        0.5,
        gt=0,
        lt=1,
        description=(
            "Fraction of each matrix that is pruned in the end, exactly `int(size * sparsity)`"
            " weights."
        ),
    )
    local_method: Literal["sparsegpt", "wanda", "ria", "magnitude"] = Field(
        "sparsegpt",
        description=(
            "Pruning method of a client. SparseGPT changes the kept weights; the others do not."
        ),
    )
    damping_mean: Literal["live", "all"] = Field(
        "live",
        description=(
            "SparseGPT: channels whose mean square is the measure of damping (1% of it): those with"
            " input that is not zero, or all, of which dead ones count as 1, as in its published"
            " code."
        ),
    )
    aggregation: Literal["l0", "mean"] = Field(
        "l0",
        description=(
            "`l0`: mean of each weight over the clients that kept it; `mean`: mean over all"
            " clients (FedAvg of pruned weights)."
        ),
    )
    mask_expansion: bool = Field(
        True,
        description=(
            "Prune the weights that most clients pruned until the sparsity is reached. `false`:"
            " prune only weights that all clients pruned."
        ),
    )
    schedule: Literal["constant", "linear", "cubic"] = Field(
        "constant",
        description=(
            "Increase of the sparsity over the rounds: none, in equal steps, or fast at first (Zhu"
            " & Gupta 2017)."
        ),
    )
    sampled_layers: float = Field(
        1.0,
        gt=0,
        le=1,
        description=(
            "Fraction of the layers that the most capable client prunes in a round; the others"
            " prune fewer in proportion, at least one."
        ),
    )
    capabilities: str = Field(
        "",
        description=(
            "Capability of each client, for instance `1,2,4`, in place of what the nodes state;"
            " the last one repeats."
        ),
    )
    coverage: Literal["every-round", "over-rounds"] = Field(
        "every-round",
        description=(
            "Action if the samples cannot cover all layers: refuse the run and state the numbers,"
            " or add rounds until all layers are covered."
        ),
    )

    @field_validator("capabilities")
    @classmethod
    def _are_positive_numbers(cls, value: str) -> str:
        try:
            numbers = [float(part) for part in value.split(",")] if value.strip() else []
        except ValueError:
            raise ValueError(
                "is not a comma-separated list of numbers, for instance 1,2,4"
            ) from None
        if not all(0 < number < float("inf") for number in numbers):
            raise ValueError("capabilities must be greater than 0")
        return value.strip()

    @model_validator(mode="after")
    def _a_pattern_has_no_schedule(self) -> "FedSpaLLMSettings":
        if self.pattern and self.schedule != "constant":
            raise ValueError(
                f"schedule = '{self.schedule}': a pattern has one sparsity; set schedule to"
                " 'constant'"
            )
        return self

    @property
    def columns_together(self) -> int:
        """Number of columns that a client prunes at a time; 0 if rows are pruned whole.

        A pattern must not cross the boundary between two such sets of columns.
        """
        return 128 if self.local_method == "sparsegpt" else 0

    def capability_of(self, client: int) -> float:
        """Return the capability of a client from ``capabilities``; the last number repeats."""
        numbers = [float(part) for part in self.capabilities.split(",")]
        return numbers[min(client, len(numbers) - 1)]

    def last_rounds(
        self, federation: FederationSettings, num_blocks: Callable[[], int], num_clients: int
    ) -> range:
        """Return the rounds after which the run may end: it continues until all layers are pruned.

        Each additional round prunes at least one more layer, unless the clients that sampled it are
        lost in that round. A client is lost only once, which bounds the number of rounds.
        """
        return range(federation.rounds, federation.rounds + num_blocks() + num_clients + 1)

    def sparsity_of(self, server_round: int, rounds: int) -> float:
        """Return the sparsity of each matrix after a round: ``sparsity`` from ``rounds`` on.

        ``linear`` increases it in equal steps. ``cubic`` follows Zhu & Gupta (2017, eq. 1): it
        increases fast at first, while many weights are redundant.
        """
        share = min(1.0, server_round / rounds)
        if self.schedule == "linear":
            return self.sparsity * share
        if self.schedule == "cubic":
            return self.sparsity * (1 - (1 - share) ** 3)
        return self.sparsity
