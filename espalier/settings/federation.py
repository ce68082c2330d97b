"""Settings that methods share which run in rounds and average the clients' updates."""

from typing import ClassVar, Literal

from pydantic import Field

from espalier.settings.method import MethodSettings
from espalier.settings.table import ReadWith, Table

Payload = Literal["float32", "bfloat16", "nf4"]
ROUNDED = ("bfloat16", "nf4")


class FederationSettings(Table):
    """Table ``[federation]``: rounds, client weights, and the wire format of adapters.

    A method reads only some of these keys. The methods' own tables define what a value means for
    them; ``schema.py`` adds that to the descriptions.
    """

    rounds: int = Field(
        0,
        ge=0,
        description="Rounds of the run; 0: as many as the method usually has.",
    )
    sampled_clients: float = Field(
        1.0, gt=0, le=1, description="Share of the clients that a round asks, at least one client."
    )
    client_weights: Literal["paper", "equal", "samples", "norms", "importance"] = Field(
        "paper",
        description=(
            "Weight of a client in the average. `samples`: the training sequences, or with"
            " fedspallm, llm-streamline and slicegpt the calibration windows, that it reports;"
            " `norms`: the Frobenius norm of the update that it sent; `importance`: what its LoRA"
            " modules are worth; `paper`: as the method's paper has it."
        ),
    )
    max_weight_ratio: float = Field(
        2.0,
        ge=1,
        description=(
            "A client weighs at most so many times as much as the median client, and as the mean"
            " one: with 2 no client of eight has more than 25% of the weight. 1: all weigh alike;"
            " 1000000: as they say. `summary.json` says whose weight was cut (`capped`)."
        ),
    )
    max_update_ratio: float = Field(
        2.0,
        ge=1,
        description=(
            "What a client changed of a tensor counts up to so many times the norm of the median"
            " client's change; a larger one is scaled down. Twice that ratio holds for single"
            " numbers: rows of fedspallm's SparseGPT, directions of slicegpt's moments, and"
            " distances of llm-streamline's cosines from 1. 1000000: no limit. It takes three"
            " clients. `summary.json` says whose was (`capped`)."
        ),
    )
    max_capability_ratio: float = Field(
        4.0,
        ge=1,
        description=(
            "A capability that a node states counts at most so many times as much as the median's."
        ),
    )
    payload: Payload = Field(
        "float32",
        description=(
            "Number format of adapters, and of llm-streamline's layer, on the wire: 4 bytes a"
            " number, 2, or with `nf4` 0.5625."
        ),
    )
    rounding: Literal["differences", "values"] = Field(
        "differences",
        description=(
            "What a payload of `bfloat16` or `nf4` rounds: the change that a round's training made,"
            " or the adapters' values. The bytes are the same."
        ),
    )
    error_feedback: bool = Field(
        True, description="What rounding to the payload's format loses is added the next time."
    )
    keep_optimizer: bool = Field(
        False,
        description=(
            "A client's AdamW goes on from round to round with its moments, which stay at the"
            " client, instead of beginning anew; not with `svd`."
        ),
    )

    READ_WITH: ClassVar[ReadWith] = {
        "rounding": {"payload": ROUNDED},
        "error-feedback": {"payload": ROUNDED},
        "max-weight-ratio": {"client-weights": ("samples", "norms", "importance")},
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
        return self.payload != "float32" and self.rounding == "differences"

    def clients_of_round(self, clients: int) -> int:
        """Return how many of ``clients`` clients take part in a round, at least one."""
        return max(1, round(clients * self.sampled_clients))
