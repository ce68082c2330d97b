"""Settings shared by methods that run in rounds and average the clients' updates."""

from typing import ClassVar, Literal

from pydantic import Field

from espalier.settings.method import MethodSettings
from espalier.settings.table import ReadWith, Table

AUTO = "auto"
MEASURED = "measured"
"""Values of ``fleet`` that name no fleet."""

NO_LIMIT = 1_000_000.0
"""Value of ``max-weight-ratio`` and ``max-update-ratio`` without a limit."""
WITHOUT_LIMITS = {
    "federation.max-update-ratio": NO_LIMIT,
    "federation.max-weight-ratio": NO_LIMIT,
}
"""Settings without limits that compare clients."""

WireDtype = Literal["float32", "bfloat16", "nf4"]


class FederationSettings(Table):
    """Table ``[federation]``: rounds, client weights, and the wire format of adapters.

    A method reads only some of these keys. The methods' own tables define what a value means for
    them; ``schema.py`` adds that to the descriptions.
    """

    rounds: int = Field(0, ge=0, description="Number of rounds; 0: the method's default.")
    sampled_clients: float = Field(
        1.0,
        gt=0,
        le=1,
        description="Fraction of the clients that take part in a round, at least one client.",
    )
    client_weights: Literal["paper", "equal", "samples", "norms", "importance"] = Field(
        "paper",
        description=(
            "Weight of a client in the average. `samples`: the number of training sequences (with"
            " fedspallm, llm-streamline and slicegpt of calibration samples) that it reports."
            " `norms`: the Frobenius norm of its update. `importance`: the importance of its LoRA"
            " modules. `equal`: the same for all clients. `paper`: as in the method's paper."
        ),
    )
    max_weight_ratio: float = Field(
        2.0,
        ge=1,
        description=(
            "Maximum weight of a client as a multiple of the median client's weight, and of the"
            " mean weight: with 2 no client of eight has more than 25% of the total weight. 1:"
            " equal weights; 1000000: no limit. `summary.json` lists the clients whose weight was"
            " reduced (`capped`)."
        ),
    )
    max_update_ratio: float = Field(
        2.0,
        ge=1,
        description=(
            "Maximum norm of a client's change of a tensor, as a multiple of the median client's;"
            " a larger change is scaled down. For single numbers the limit is twice this ratio:"
            " rows of fedspallm's SparseGPT, directions of slicegpt's moments, distances of"
            " llm-streamline's cosines from 1, variances of flap and scores of llm-pruner. 1000000:"
            " no limit. The limit needs at least three clients. `summary.json` lists the clients that were limited (`capped`)."
        ),
    )
    wire_dtype: WireDtype = Field(
        "float32",
        description=(
            "Wire format of adapters and of llm-streamline's layer: 4 bytes per number, 2 with"
            " `bfloat16`, 0.5625 with `nf4`. With `bfloat16` and `nf4` a client sends the change that"
            " its training made; what rounding loses is added to the next update."
        ),
    )

    secure_sum: bool = Field(
        False,
        description=(
            "The server learns the sum of the clients' tensors and no client's own: clients mask"
            " them with keys that they agree on (docs/secure-sums.md). The sum is the same, bit for"
            " bit. It takes three more exchanges per round, and at least three clients."
        ),
    )
    fleet: str = Field(
        AUTO,
        min_length=1,
        description=(
            "Virtual devices that determine `virtual_seconds` in summary and ledger, and with"
            " fedspine the times in rewards: `full`, `low`, `medium` or `high` of `conf/devices`,"
            " or a file. `measured`: no virtual devices; fedspine's rewards then depend on the"
            " seconds that clients measure, which differ from run to run. `auto`: with fedspine"
            " `full` in a simulation, otherwise `measured`."
        ),
    )

    READ_WITH: ClassVar[ReadWith] = {
        "max-weight-ratio": {"client-weights": ("samples", "norms", "importance")}
    }

    def for_method(self, job: MethodSettings) -> "FederationSettings":
        """Return this table with the method's values for 0 rounds and ``paper`` weights.

        Keys that the method does not read stay as they are.
        """
        found: dict[str, int | str] = {}
        if "rounds" in job.FEDERATION:
            found["rounds"] = self.rounds or job.ROUNDS
        if "client-weights" in job.FEDERATION and self.client_weights == "paper":
            found["client_weights"] = job.WEIGHTS[0]
        return self.model_copy(update=found)

    @property
    def sends_differences(self) -> bool:
        """True if a client sends the change that its training made and not the adapters' values.

        The server then adds the change to its own global adapters.
        """
        return self.wire_dtype != "float32"

    def compares_clients(self, job: MethodSettings) -> str:
        """Return which limit needs each client's reply by itself, as a sentence; empty if none.

        Without ``client-weights``, clients count by their tokens or by the size of their numbers.
        """
        weights = job.WEIGHTS[0] if self.client_weights == "paper" else self.client_weights
        has_effect = {
            "max-update-ratio": (self.max_update_ratio, True),
            "max-weight-ratio": (self.max_weight_ratio, weights != "equal"),
        }
        found = [
            f"federation.{key} = {ratio:g}"
            for key, (ratio, used) in has_effect.items()
            if used and key in job.FEDERATION and ratio < NO_LIMIT
        ]
        if not found:
            return ""
        verb, them = ("compares", "it") if len(found) == 1 else ("compare", "them")
        return (
            f"{' and '.join(found)} {verb} single clients, whose replies the server does not see;"
            f" set {them} to {NO_LIMIT:.0f} (no limit)"
        )

    def fleet_name(self, job: MethodSettings, *, simulation: bool) -> str:
        """Return the name of the run's fleet; empty without virtual devices."""
        if "fleet" not in job.FEDERATION:
            return ""
        automatic = job.FLEET if simulation else MEASURED
        chosen = automatic if self.fleet == AUTO else self.fleet
        return "" if chosen == MEASURED else chosen

    def clients_of_round(self, clients: int) -> int:
        """Return how many of ``clients`` clients take part in a round, at least one."""
        return max(1, round(clients * self.sampled_clients))
