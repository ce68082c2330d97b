"""Settings that all methods have that average adapters."""

from collections.abc import Mapping
from typing import ClassVar

from espalier.models.adapters import FACTORS, Bases
from espalier.settings.method import MethodSettings
from espalier.settings.run import RunSettings
from espalier.settings.tables.federation import BY_COORDINATE, FederationSettings
from espalier.settings.tables.lora import LoraSettings


class AdapterAveraging(MethodSettings):
    """Settings and properties shared by all methods that average adapters."""

    FEDERATION: ClassVar[tuple[str, ...]] = (
        "rounds", "sampled-clients", "client-weights", "max-weight-ratio", "aggregation-rule",
        "trimmed-clients", "max-update-ratio", "max-update-norm", "wire-dtype",
    )  # fmt: skip
    ROUNDS = 3
    WEIGHTS: ClassVar[tuple[str, ...]] = ("samples", "equal")
    RULES: ClassVar[tuple[str, ...]] = ("clipped-mean", "mean", "trimmed-mean", "median")
    FIRST_PUSH = 2
    """First round with a ``push`` message; clients make the first adapters from the seed."""

    def asked_of_sites(self, run: RunSettings) -> Mapping[str, tuple[str, int]]:
        """Return the steps and sequences of a round and the tokens of a forward pass."""
        training = run.training
        passes = training.steps * training.accumulation
        return {
            "max_batch_tokens": (
                "training.batch-size x tokens of a sequence",
                training.batch_size * run.training_tokens,
            ),
            "max_steps": ("training.steps x training.accumulation", passes),
        }

    @property
    def has_local_baseline(self) -> bool:
        """True: the local baseline trains for as many steps as all rounds together."""
        return True

    def contradictions(
        self, method: str, federation: FederationSettings, lora: LoraSettings, num_clients: int
    ) -> list[str]:
        """Return an error line for a rule by coordinate with updates B A.

        Their coordinates would be those of the dense product, which is never computed.
        """
        lines = super().contradictions(method, federation, lora, num_clients)
        rule = federation.aggregation_rule
        if self.averages_updates and rule in BY_COORDINATE and rule in self.RULES:
            lines.append(
                f"federation.aggregation-rule = '{rule}': with {method}.aggregation = 'svd' the"
                " updates B A are averaged, and their coordinates are those of the dense matrix,"
                " which the server never computes; set aggregation to 'factors', or the rule to"
                " 'clipped-mean'"
            )
        return lines

    @property
    def averages_updates(self) -> bool:
        """True if the updates B A are averaged, and not A and B separately.

        An SVD then gives the best approximation of the mean for the adapters' rank.
        """
        return False

    @property
    def averaged(self) -> str:
        """Word for what is averaged, for a run's description."""
        return "updates" if self.averages_updates else "factors"

    @property
    def bases(self) -> Bases:
        """Kind of the frozen factors if only the matrix between them is trained, else empty."""
        return ""

    @property
    def sent_factors(self) -> tuple[str, ...]:
        """Factors that the server sends; clients make the others from the run's seed."""
        return FACTORS

    def trained_factors(self, server_round: int) -> tuple[str, ...]:
        """Return the factors that clients train and send in a round."""
        return self.sent_factors

    def rank_folded_by(self, run: RunSettings) -> int:
        """Return by how much a round raises the rank of the updates folded into the base."""
        return 0

    def adapter_seed(self, seed: int, server_round: int) -> int:
        """Return the seed of the initial adapters of a round, which is the same in all rounds."""
        return seed

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

    def secure_sum_fault(self, federation: FederationSettings) -> str:
        """Return which settings need single replies; empty if none do."""
        if federation.sends_differences:
            return (
                f"federation.wire-dtype = '{federation.wire_dtype}' rounds each client's adapters"
                " before they are summed, and saves no bytes then; set it to 'float32'"
            )
        return ""

    def pushes_differences(self, federation: FederationSettings) -> bool:
        """Return whether the server sends the change of the global adapters since the first ones.

        Every client makes the first adapters itself. With the SVD nothing of these is left in the
        factors, which are smaller than the difference and are sent themselves.
        """
        return federation.sends_differences and not self.averages_updates

    def lora_of(self, lora: LoraSettings, num_blocks: int) -> LoraSettings:
        """Return the LoRA settings that clients train in a model with ``num_blocks`` blocks."""
        return lora

    def rank_limit_of(self, client: int, lora: LoraSettings) -> int:
        """Return the largest rank of a client's adapters; here it is the same for all clients."""
        return lora.rank


def folding_faults(given: str, federation: FederationSettings, lora: LoraSettings) -> list[str]:
    """Return an error line for each setting with which no update is folded into the base.

    ``given`` names the key and the value that fold it.
    """
    lines = []
    if federation.sends_differences:
        lines.append(
            f"federation.wire-dtype = '{federation.wire_dtype}': {given} sums updates exactly,"
            " and this would round them; set it to 'float32'"
        )
    if lora.keep_zeros:
        lines.append(
            f"lora.keep-zeros = true: {given} folds updates into the base, which would fill its"
            " zeros; set it to false"
        )
    return lines
