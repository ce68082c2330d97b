"""Settings of FedPETuning and of all methods that average LoRA adapters."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from espalier.settings.federation import FederationSettings
from espalier.settings.lora import LoraSettings
from espalier.settings.method import MethodSettings
from espalier.settings.task import TEXT

if TYPE_CHECKING:
    from espalier.settings.run import RunSettings


class AdapterAveraging(MethodSettings):
    """Settings and properties shared by all methods that average adapters."""

    FEDERATION: ClassVar[tuple[str, ...]] = (
        "rounds", "sampled-clients", "client-weights", "max-weight-ratio", "max-update-ratio", "wire-dtype",
    )  # fmt: skip
    ROUNDS = 3
    WEIGHTS: ClassVar[tuple[str, ...]] = ("samples", "equal")
    FIRST_DELIVERY = 2
    """First round with a ``deliver`` message; clients make the first adapters from the seed."""

    def asked_of_sites(self, run: "RunSettings") -> Mapping[str, tuple[str, int]]:
        """Return the steps and sequences of a round and the tokens of a forward pass."""
        training = run.training
        tokens = run.data.sequence_length if run.task.name == TEXT else run.task.max_tokens
        passes = training.steps * training.accumulation
        return {
            "max_batch_tokens": (
                "training.batch-size x tokens of a sequence",
                training.batch_size * tokens,
            ),
            "max_steps": ("training.steps x training.accumulation", passes),
        }

    @property
    def has_local_baseline(self) -> bool:
        """True: the local baseline trains for as many steps as all rounds together."""
        return True

    @property
    def averages_updates(self) -> bool:
        """True if the updates B A are averaged, and not A and B separately.

        An SVD then gives the best approximation of the mean for the adapters' rank.
        """
        return False

    @property
    def lowers_ranks(self) -> bool:
        """True if a client may continue with a lower rank than the server asked for."""
        return False

    @property
    def feeds_back(self) -> bool:
        """Return whether the loss of rounding is added the next time (error feedback).

        It is False with the SVD: A and B get other directions in every round, so a loss of the
        previous round has no meaning in them.
        """
        return not self.averages_updates

    def delivers_differences(self, federation: FederationSettings) -> bool:
        """Return whether the server sends the change of the global adapters since the first ones.

        Every client makes the first adapters itself. With the SVD nothing of these is left in the
        factors, which are smaller than the difference and are sent themselves.
        """
        return federation.sends_differences and not self.averages_updates

    def lora_of(self, lora: LoraSettings, num_blocks: int) -> LoraSettings:
        """Return the LoRA settings that clients train in a model with ``num_blocks`` blocks."""
        return lora

    @property
    def limits_differ(self) -> bool:
        """True if the server may ask clients to train adapters of lower ranks."""
        return False

    def largest_limit(self, lora: LoraSettings) -> int:
        """Return the largest rank that a client may be asked to train."""
        return lora.rank

    def rank_limit_of(self, client: int, lora: LoraSettings) -> int:
        """Return the largest rank of a client's adapters; here it is the same for all clients."""
        return lora.rank


class FedPETuningSettings(AdapterAveraging):
    """Table ``[fedpetuning]`` (Zhang et al. 2023, "FedPETuning")."""

    FEDERATION: ClassVar[tuple[str, ...]] = (*AdapterAveraging.FEDERATION, "fleet")

    aggregation: Literal["factors", "svd"] = Field(
        "factors",
        description=(
            "`factors`: mean of A and mean of B, as in the paper; `svd`: best approximation of the"
            " mean of the updates B A."
        ),
    )

    @property
    def averages_updates(self) -> bool:
        """True if the updates B A are averaged, and not A and B separately."""
        return self.aggregation == "svd"
