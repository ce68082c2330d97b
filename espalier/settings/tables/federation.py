"""Settings shared by methods: rounds, weights and aggregation of the clients' replies."""

from typing import ClassVar, Literal

from pydantic import Field

from espalier.settings.method import MethodSettings
from espalier.settings.table import ReadWith, Table

AUTO = "auto"
MEASURED = "measured"
"""Values of ``fleet`` that name no fleet."""

NO_LIMIT = 1_000_000.0
"""Ratio that limits nobody."""
WireDtype = Literal["float32", "bfloat16", "nf4"]
AggregationRule = Literal["auto", "mean", "clipped-mean", "trimmed-mean", "median"]
OF_THE_METHOD = {"client-weights": ("auto", "WEIGHTS"), "aggregation-rule": ("auto", "RULES")}
"""Keys whose allowed values a method's table lists.

By key: the value that stands for the first of them, and the attribute of ``MethodSettings``.
"""
LIMITING = ("clipped-mean", "trimmed-mean", "median")
"""Rules that limit what one client can do relative to the others."""
BY_COORDINATE = ("trimmed-mean", "median")
"""Rules that look at each number of all clients separately."""


class FederationSettings(Table):
    """Table ``[federation]``: rounds, client weights, and the wire format of adapters.

    A method reads only some of these keys. The methods' own tables define what a value means for
    them; the page of settings adds that to the descriptions.
    """

    rounds: int = Field(0, ge=0, description="Number of rounds; 0: the method's default.")
    sampled_clients: float = Field(
        1.0,
        gt=0,
        le=1,
        description="Fraction of the clients that take part in a round, at least one client.",
    )
    client_weights: Literal[
        "auto", "equal", "samples", "norms", "importance", "importance-samples"
    ] = Field(
        "auto",
        description=(
            "Weight of a client in the average. `samples`: the number of training sequences (with"
            " fedspallm, llm-streamline and slicegpt of calibration samples) that it reports."
            " `norms`: the Frobenius norm of its update. `importance`: the importance of its LoRA"
            " modules, as in fedspine's paper. `importance-samples`: that importance times the"
            " number of sequences. `equal`: the same for all clients. `auto`: the method's own, in"
            " raFLoRA (`hetlora.rank-weights=holders`) `samples`, and `equal` with `secure-sum`:"
            " otherwise the sum can be almost that of one large site."
        ),
    )
    max_weight_ratio: float = Field(
        2.0,
        ge=1,
        description=(
            "Maximum weight of a client as a multiple of the median client's weight, and of the"
            " mean weight: with 2 no client of eight has more than 25% of the total weight. 1:"
            " equal weights; 1000000: no limit, for sites that are trusted to count their data:"
            " with one client of very much data the limit costs accuracy. With"
            " `hetlora.rank-weights=holders` it also limits a client's share of each rank."
            " `summary.json` lists the clients whose weight was reduced (`capped`)."
        ),
    )
    aggregation_rule: AggregationRule = Field(
        "auto",
        description=(
            "How the server combines the clients' numbers. `mean`: mean, sum or count of votes,"
            " without limits. `clipped-mean`: mean with the limits of `max-update-ratio`."
            " `trimmed-mean`: mean of each number without the `trimmed-clients` largest and"
            " smallest values; for votes these are the first and last votes for a weight. `median`:"
            " the same, but as many values as possible are left out. `auto`: the method's own rule,"
            " and `mean` with `secure-sum`."
        ),
    )
    trimmed_clients: int = Field(
        1,
        ge=1,
        description=(
            "Number of largest and of smallest values that a trimmed mean leaves out: the number of"
            " bad clients that it withstands. If too few clients answer, it becomes the median."
        ),
    )
    max_update_ratio: float = Field(
        2.0,
        ge=1,
        description=(
            "Maximum norm of a client's change of a tensor, as a multiple of the median client's;"
            " a larger change is scaled down. For single numbers the limit is twice this ratio:"
            " rows of fedspallm's SparseGPT, directions of slicegpt's moments, distances of"
            " llm-streamline's cosines from 1, variances of flap and scores of llm-pruner. In"
            " pooled-pruning the mean of each channel stays within this ratio. 1000000: no limit."
            " The limit needs at least three clients. `summary.json` lists the clients that were"
            " limited (`capped`)."
        ),
    )
    max_update_norm: float = Field(
        0.0,
        ge=0,
        le=1e6,
        description=(
            "Maximum L2 norm of a client's change of all tensors of a round together. The client"
            " scales a larger change down before anything leaves, so the limit also holds with"
            " `secure-sum`, where the server cannot limit single clients; it binds clients that"
            " follow the program. 0: no limit."
        ),
    )
    wire_dtype: WireDtype = Field(
        "float32",
        description=(
            "Wire format of adapters and of llm-streamline's layer: 4 bytes per number, 2 with"
            " `bfloat16`, 0.5625 with `nf4`. With `bfloat16` and `nf4` a client sends the change"
            " that its training made; what rounding loses is added to the next update."
        ),
    )

    secure_sum: bool = Field(
        False,
        description=(
            "The server learns the sum of the clients' tensors and no client's own: clients mask"
            " them with keys that they agree on (docs/privacy/secure-sums.md). The sum is the same,"
            " bit for bit. It takes four more exchanges per round, and at least three clients."
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
        "max-weight-ratio": {
            "client-weights": ("samples", "norms", "importance", "importance-samples"),
            "aggregation-rule": LIMITING,
        },
        "max-update-ratio": {"aggregation-rule": ("clipped-mean",)},
        "trimmed-clients": {"aggregation-rule": ("trimmed-mean",)},
    }

    def for_method(self, job: MethodSettings) -> "FederationSettings":
        """Return this table with the method's values for 0 rounds and ``auto``.

        Keys that the method does not read stay as they are.
        """
        found: dict[str, int | str] = {}
        if "rounds" in job.FEDERATION:
            found["rounds"] = self.rounds or job.ROUNDS
        if "client-weights" in job.FEDERATION and self.client_weights == "auto":
            # Otherwise a sum could be almost that of one site with far more data than the others.
            weighted = not (self.secure_sum and "equal" in job.WEIGHTS)
            found["client_weights"] = job.own_weights if weighted else "equal"
        if "aggregation-rule" in job.FEDERATION and self.aggregation_rule == "auto":
            found["aggregation_rule"] = (
                "mean" if self.secure_sum and "mean" in job.RULES else job.RULES[0]
            )
        return self.model_copy(update=found)

    @property
    def sends_differences(self) -> bool:
        """True if a client sends the change that its training made and not the adapters' values.

        The server then adds the change to its own global adapters.
        """
        return self.wire_dtype != "float32"

    @property
    def weighs_samples(self) -> bool:
        """True if a client's number of samples is its weight, or a factor of it."""
        return self.client_weights in ("samples", "importance-samples")

    @property
    def clips(self) -> bool:
        """True if contributions are limited relative to the median client's."""
        return self.aggregation_rule == "clipped-mean"

    @property
    def update_limit(self) -> float:
        """Ratio of ``max-update-ratio``, or one that limits nobody if the rule does not clip."""
        return self.max_update_ratio if self.clips else NO_LIMIT

    @property
    def weight_limit(self) -> float:
        """Ratio of ``max-weight-ratio``, or one that limits nobody with a plain mean."""
        return NO_LIMIT if self.aggregation_rule == "mean" else self.max_weight_ratio

    @property
    def rule_in_words(self) -> str:
        """Rule in words after a comma, for a run's description; empty for means."""
        if self.aggregation_rule == "median":
            return ", median of the clients"
        if self.aggregation_rule == "trimmed-mean":
            return f", without the {self.trimmed_clients} largest and smallest values"
        return ""

    def trim(self, clients: int) -> int:
        """Return how many of ``clients`` values are left out at each end; 0 for a mean."""
        most = largest_trim(clients)
        if self.aggregation_rule == "median":
            return most
        return min(self.trimmed_clients, most) if self.aggregation_rule == "trimmed-mean" else 0

    def rule_mistakes(self, method: str, job: MethodSettings, num_clients: int) -> list[str]:
        """Return an error line if a method cannot aggregate by the rule, or for too few clients."""
        rule = self.aggregation_rule
        given = f"federation.aggregation-rule = '{rule}'"
        if rule not in job.RULES:
            allowed = " or ".join(map(repr, ("auto", *job.RULES)))
            why = f": {job.WHY_NO_OTHER_RULE}" if job.WHY_NO_OTHER_RULE else ""
            return [f"{given}: {method} cannot use this rule{why}; set it to {allowed}"]
        clients = self.clients_of_round(num_clients)
        if rule in BY_COORDINATE and largest_trim(clients) < 1:
            return [
                f"{given}: needs three clients in a round, and there are {clients}; raise"
                " num-clients, or set it to 'mean'"
            ]
        if rule == "trimmed-mean" and self.trimmed_clients > largest_trim(clients):
            return [
                f"federation.trimmed-clients = {self.trimmed_clients}: at most"
                f" {largest_trim(clients)} values can be left out at each end of {clients}; lower"
                " it, or let more clients take part"
            ]
        return []

    def secure_sum_fault(self) -> str:
        """Return that the rule needs single replies, as a sentence; empty for a mean.

        With secure sums the server sees the sum only. A median, a trimmed mean or a limit relative
        to other clients cannot be computed from it.
        """
        if self.aggregation_rule == "mean":
            return ""
        return (
            f"federation.aggregation-rule = '{self.aggregation_rule}' compares single clients,"
            " whose replies the server does not see; set it to 'mean'"
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


def largest_trim(clients: int) -> int:
    """Return how many values the median leaves out at each end; one or two values stay."""
    return (clients - 1) // 2
