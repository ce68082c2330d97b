"""Settings of FedSpaLLM: federated pruning with l0 aggregation, mask expansion and layer sampling."""

from typing import ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from espalier.settings.pattern import Pattern
from espalier.settings.table import ReadWith, Table


class FedSpaLLMSettings(Table):
    """Table ``[fedspallm]`` (paper's terms: FedSpaLLM section 4). A layer is a decoder block."""

    sparsity: float = Field(0.5, gt=0, lt=1, description="share of each matrix that is pruned in the end")
    pattern: Pattern = Field("", description="n:m keeps n of every m weights of a row, in place of sparsity and groups")
    local_method: Literal["sparsegpt", "wanda", "ria", "magnitude"] = Field(
        "sparsegpt", description="how a client prunes; sparsegpt alone changes the kept weights"
    )
    local_comparison_group: Literal["layer", "row"] = Field(
        "layer", description="weights that compete at a client; sparsegpt compares the rows of 128 columns at a time"
    )
    comparison_group: Literal["layer", "row"] = Field("layer", description="weights that compete in the mask expansion")
    damping: float = Field(0.01, gt=0, le=1, description="sparsegpt: share of the Hessian's mean diagonal that is added to it")
    damping_mean: Literal["live", "all"] = Field(
        "live", description="sparsegpt: channels of that mean; all: dead ones count as 1, as in its published code"
    )
    aggregation: Literal["l0", "mean"] = Field(
        "l0", description="mean over the clients that kept a weight, or over all of them (FedAvg of pruned weights)"
    )
    client_weights: Literal["equal", "samples"] = Field("equal", description="weight of a client in the mean")
    max_weight_ratio: float = Field(
        10.0, ge=1, description="a client weighs at most so many times as much as the median client"
    )
    mask_expansion: bool = Field(True, description="prune the most pruned weights until the sparsity is reached")
    ties: Literal["magnitude", "index", "random"] = Field(
        "magnitude", description="which of the weights that equally many clients pruned goes first"
    )
    rounds: int = Field(1, ge=1, description="rounds of pruning")
    schedule: Literal["constant", "linear", "cubic"] = Field("constant", description="how the sparsity rises over the rounds")
    sampled_layers: float = Field(
        1.0, gt=0, le=1, description="share of the layers that the most capable client prunes in a round"
    )
    capabilities: str = Field(
        "", description="comma-separated capability of each client, in place of what the nodes state; the last one repeats"
    )
    max_capability_ratio: float = Field(
        4.0, ge=1, description="a capability that a node states counts at most so many times the median's"
    )
    coverage: Literal["every-round", "over-rounds"] = Field(
        "every-round", description="if the samples cannot cover all layers: refuse, or add rounds until they have"
    )

    READ_WITH: ClassVar[ReadWith] = {
        "sparsity": {"pattern": ("",)},
        "local-comparison-group": {"pattern": ("",), "local-method": ("wanda", "ria", "magnitude")},
        "comparison-group": {"pattern": ("",), "mask-expansion": (True,)},
        "damping": {"local-method": ("sparsegpt",)},
        "damping-mean": {"local-method": ("sparsegpt",)},
        "max-weight-ratio": {"client-weights": ("samples",)},
        "max-capability-ratio": {"capabilities": ("",)},
        "ties": {"mask-expansion": (True,)},
    }

    @field_validator("capabilities")
    @classmethod
    def _are_positive_numbers(cls, value: str) -> str:
        try:
            numbers = [float(part) for part in value.split(",")] if value.strip() else []
        except ValueError:
            raise ValueError("is no comma-separated list of numbers, for instance 1,2,4") from None
        if not all(0 < number < float("inf") for number in numbers):
            raise ValueError("capabilities must be greater than 0")
        return value.strip()

    @model_validator(mode="after")
    def _a_pattern_has_no_schedule(self) -> "FedSpaLLMSettings":
        if self.pattern and self.schedule != "constant":
            raise ValueError(f"schedule = '{self.schedule}': a pattern has one sparsity; set schedule to 'constant'")
        return self

    @property
    def local_group(self) -> str:
        """Groups of which a client prunes an exact share: the pattern, or ``local-comparison-group``."""
        return self.pattern or ("layer" if self.local_method == "sparsegpt" else self.local_comparison_group)

    @property
    def server_group(self) -> str:
        """Weights that compete in the mask expansion: the pattern, or ``comparison-group``."""
        return self.pattern or self.comparison_group

    def capability_of(self, client: int) -> float:
        """The capability that ``capabilities`` gives a client."""
        numbers = [float(part) for part in self.capabilities.split(",")]
        return numbers[min(client, len(numbers) - 1)]

    def sparsity_of(self, server_round: int) -> float:
        """Share of each matrix that a round prunes: ``sparsity`` from the last planned round on.

        ``linear`` rises by equal steps, ``cubic`` as Zhu & Gupta (2017, eq. 1): fast at first, when much is redundant.
        """
        share = min(1.0, server_round / self.rounds)
        if self.schedule == "linear":
            return self.sparsity * share
        if self.schedule == "cubic":
            return self.sparsity * (1 - (1 - share) ** 3)
        return self.sparsity
