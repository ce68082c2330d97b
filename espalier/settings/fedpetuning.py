"""Settings of FedPETuning: federated averaging of LoRA adapters, and what it shares with other methods that average them."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from espalier.settings.federation import FederationSettings
from espalier.settings.lora import LoraSettings
from espalier.settings.method import MethodSettings
from espalier.settings.table import ReadWith
from espalier.settings.task import TEXT
from espalier.settings.timed import TimedSettings

if TYPE_CHECKING:
    from espalier.settings.run import RunSettings


class AdapterAveraging(MethodSettings):
    """What every method says that averages adapters."""

    FEDERATION: ClassVar[tuple[str, ...]] = (
        "rounds", "sampled-clients", "client-weights", "max-weight-ratio", "max-update-ratio", "payload",
        "rounding", "error-feedback", "keep-optimizer",
    )  # fmt: skip
    ROUNDS = 3
    WEIGHTS: ClassVar[tuple[str, ...]] = ("samples", "equal")
    FIRST_DELIVERY = 2
    """The first adapters come from the seed."""
    READ_WITH: ClassVar[ReadWith] = {
        "federation.error-feedback": {"aggregation": ("factors", "zero-pad")}
    }

    def asked_of_sites(self, run: "RunSettings") -> Mapping[str, tuple[str, int]]:
        """Steps and sequences of a round, and tokens of a forward pass."""
        training = run.training
        tokens = run.data.window_tokens if run.task.name == TEXT else run.task.max_tokens
        passes = training.steps * training.accumulation
        return {
            "most_batch_tokens": (
                "training.batch-size x tokens of a sequence",
                training.batch_size * tokens,
            ),
            "most_sequences": (
                "training.steps x training.accumulation x training.batch-size",
                passes * training.batch_size,
            ),
            "most_steps": ("training.steps x training.accumulation", passes),
        }

    @property
    def makes_alone(self) -> bool:
        """Clients train alone in as many steps as all rounds have."""
        return True

    @property
    def averages_updates(self) -> bool:
        """Whether the updates B A are averaged, and their best approximation is kept (an SVD), in place of A and B."""
        return False

    @property
    def lowers_ranks(self) -> bool:
        """Whether a client may go on with a lower rank than it was asked for."""
        return False

    def feeds_back(self, federation: FederationSettings) -> bool:
        """Whether what rounding loses is added the next time.

        The SVD gives A and B other directions in every round, in which a loss of the round before means nothing.
        """
        return federation.error_feedback and not self.averages_updates

    def delivers_differences(self, federation: FederationSettings) -> bool:
        """Whether the server sends what leads to the global adapters from the first ones, which every client makes itself.

        Of those the SVD leaves nothing: its factors are smaller than the difference.
        """
        return federation.sends_differences and not self.averages_updates

    def contradictions(
        self, method: str, federation: FederationSettings, lora: LoraSettings, num_clients: int
    ) -> list[str]:
        """What does not fit each other in these tables."""
        if not (federation.keep_optimizer and self.averages_updates):
            return []
        return [
            f"federation.keep-optimizer = true: {self.svd_of(method)} gives the adapters other"
            " directions in every round, which AdamW's moments know nothing of; choose one of"
            " the two"
        ]

    def svd_of(self, method: str) -> str:
        """What has the updates' mean factored anew."""
        return f"{method}.aggregation = 'svd'"

    def lora_of(self, lora: LoraSettings, num_blocks: int) -> LoraSettings:
        """What clients train, in the words of ``[lora]``, of a model of so many blocks."""
        return lora

    @property
    def limits_differ(self) -> bool:
        """Whether the server may ask clients to train adapters of lower ranks."""
        return False

    def largest_limit(self, lora: LoraSettings) -> int:
        """Largest rank that a client may be asked to train."""
        return lora.largest_rank

    def rank_limit_of(self, client: int, lora: LoraSettings) -> int:
        """Largest rank of an adapter that a client trains: every client trains whole adapters."""
        return lora.largest_rank


class FedPETuningSettings(AdapterAveraging, TimedSettings):
    """Table ``[fedpetuning]`` (Zhang et al. 2023, "FedPETuning")."""

    aggregation: Literal["factors", "svd"] = Field(
        "factors",
        description=(
            "`factors`: the mean of A and the mean of B, as the paper has it; `svd`: the best"
            " approximation of the mean of the updates B A."
        ),
    )

    @property
    def averages_updates(self) -> bool:
        """Whether the updates B A are averaged."""
        return self.aggregation == "svd"
