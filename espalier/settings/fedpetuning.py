"""Settings of FedPETuning: federated averaging of LoRA adapters, and what it shares with other methods that average them."""

from typing import ClassVar, Literal

from pydantic import Field

from espalier.settings.lora import LoraSettings
from espalier.settings.table import ReadWith, Table

Payload = Literal["float32", "bfloat16", "nf4"]
ROUNDED = ("bfloat16", "nf4")


class AdapterAveraging(Table):
    """Keys of every method that averages adapters."""

    rounds: int = Field(3, ge=1, description="rounds of training and averaging")
    sampled_clients: float = Field(1.0, gt=0, le=1, description="share of the clients that a round trains, at least one")
    payload: Payload = Field("float32", description="dtype of adapter tensors on the wire")
    error_feedback: bool = Field(
        True, description="what rounding to the payload's dtype loses is added the next time, unless the aggregation is svd"
    )
    rounding: Literal["differences", "values"] = Field(
        "differences", description="what a payload of bfloat16 or nf4 rounds: what a round's training changed, or all values"
    )
    max_weight_ratio: float = Field(
        10.0, ge=1, description="a client weighs at most so many times as much as the median client"
    )
    keep_optimizer: bool = Field(False, description="a client's AdamW goes on from round to round, instead of beginning anew")

    READ_WITH: ClassVar[ReadWith] = {
        "rounding": {"payload": ROUNDED},
        "error-feedback": {"payload": ROUNDED, "aggregation": ("factors", "zero-pad")},
        "max-weight-ratio": {"client-weights": ("samples", "norms")},
    }

    @property
    def feeds_back(self) -> bool:
        """Whether what rounding loses is added the next time.

        The SVD gives A and B other directions in every round, in which a loss of the round before means nothing.
        """
        return self.error_feedback and getattr(self, "aggregation", "") != "svd"

    @property
    def sends_differences(self) -> bool:
        """Whether a client sends what its training changed, and the server adds it to its own global adapters."""
        return self.payload != "float32" and self.rounding == "differences"

    @property
    def delivers_differences(self) -> bool:
        """Whether the server sends what leads to the global adapters from the first ones, which every client makes itself.

        Of those the SVD leaves nothing: its factors are smaller than the difference.
        """
        return self.sends_differences and getattr(self, "aggregation", "") != "svd"

    @property
    def lowers_ranks(self) -> bool:
        """Whether a client may go on with a lower rank than it was asked for."""
        return False

    def contradictions(self, method: str, lora: LoraSettings, num_clients: int) -> list[str]:
        """What does not fit each other in this table, or this table and the adapters or the number of clients."""
        if not (self.keep_optimizer and getattr(self, "aggregation", "") == "svd"):
            return []
        return [
            f"{method}.keep-optimizer = true: {method}.aggregation = 'svd' gives the adapters other directions in every round, "
            "which AdamW's moments know nothing of; choose one of the two"
        ]

    def clients_of_round(self, clients: int) -> int:
        """How many of so many clients a round trains."""
        return max(1, round(clients * self.sampled_clients))

    def rank_limit_of(self, client: int, lora: LoraSettings) -> int:
        """Largest rank of an adapter that a client trains: every client trains whole adapters."""
        return lora.largest_rank


class FedPETuningSettings(AdapterAveraging):
    """Table ``[fedpetuning]`` (Zhang et al. 2023, "FedPETuning")."""

    client_weights: Literal["samples", "equal"] = Field("samples", description="weight of a client in the average")
    aggregation: Literal["factors", "svd"] = Field(
        "factors", description="average A and B, or the updates B A, of which the best approximation of the rank is kept"
    )
