"""Settings of HetLoRA: federated averaging of LoRA adapters whose rank differs from client to client."""

import re
from typing import ClassVar, Literal

from pydantic import Field, field_validator

from espalier.settings.fedpetuning import AdapterAveraging
from espalier.settings.lora import LoraSettings
from espalier.settings.table import ReadWith
from espalier.settings.training import MOST_PULL


class HetLoRASettings(AdapterAveraging):
    """Table ``[hetlora]`` (Cho et al. 2024, "Heterogeneous LoRA for Federated Fine-tuning of On-Device Foundation Models")."""

    ranks: str = Field(
        "", description="comma-separated rank of each client's adapters, in place of its capability's; the last one repeats"
    )
    max_capability_ratio: float = Field(
        4.0, ge=1, description="a capability that a node states counts at most so many times the median's"
    )
    client_weights: Literal["norms", "samples", "equal"] = Field(
        "norms", description="weight of a client in the average; norms: the Frobenius norm of the update that it sent"
    )
    aggregation: Literal["zero-pad", "svd"] = Field(
        "zero-pad", description="average A and B padded with zeros, or the updates B A, of which the best approximation is kept"
    )
    self_pruning: bool = Field(True, description="a client lowers its rank when training has made its last ranks weaker")
    gamma: float = Field(0.85, gt=0, le=1, description="self-pruning: share of a client's ranks that stay")
    regularisation: float = Field(
        0.005, ge=0, le=MOST_PULL, description="self-pruning: weight in the training loss of the ranks that may be pruned"
    )

    READ_WITH: ClassVar[ReadWith] = {
        **AdapterAveraging.READ_WITH,
        "max-capability-ratio": {"ranks": ("",)},
        "gamma": {"self-pruning": (True,)},
        "regularisation": {"self-pruning": (True,)},
    }

    @field_validator("ranks")
    @classmethod
    def _are_ranks(cls, value: str) -> str:
        if value.strip() and not all(re.fullmatch(r"[1-9][0-9]{0,5}", part.strip()) for part in value.split(",")):
            raise ValueError("is no comma-separated list of ranks from 1 on, for instance 2,4,8")
        return value.strip()

    def rank_limit_of(self, client: int, lora: LoraSettings) -> int:
        """Rank that a client begins with; where its capability decides, which the server knows, the largest."""
        given = self._given()
        return given[min(client, len(given) - 1)] if given else lora.largest_rank

    @property
    def lowers_ranks(self) -> bool:
        """Whether a client may go on with a lower rank than it was asked for."""
        return self.self_pruning

    def contradictions(self, method: str, lora: LoraSettings, num_clients: int) -> list[str]:
        """As of every averaging, and ranks whose last would stay untrained, because no client has as many."""
        lines, given, largest = super().contradictions(method, lora, num_clients), self._given(), lora.largest_rank
        taken = given[:num_clients]
        if not taken or max(taken) == largest:
            return lines
        where = "lora.rank" if lora.rank_is_used and largest == lora.rank else "lora.rank-pattern"
        which = "the largest"
        if taken != given:
            which = f"num-clients = {num_clients} takes the first {num_clients}, the largest of which"
        return [
            *lines,
            f"hetlora.ranks = '{self.ranks}': {which} is {max(taken)}, that of {where} is {largest}; make them equal",
        ]

    def _given(self) -> list[int]:
        return [int(part) for part in self.ranks.split(",")] if self.ranks else []
