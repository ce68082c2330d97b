"""Settings of SFT-P: each client prunes its own model with masks from a shared generator.

The generator computes the masks from an embedding that belongs to the client.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, field_validator

from espalier.amounts import count
from espalier.settings.federation import FederationSettings
from espalier.settings.fedpetuning import AdapterAveraging
from espalier.settings.lora import LoraSettings
from espalier.settings.personal import PersonalModelSettings
from espalier.settings.table import ReadWith
from espalier.settings.task import TEXT
from espalier.settings.training import MOST_LEARNING_RATE

if TYPE_CHECKING:
    from espalier.settings.run import RunSettings

LEAST_SHARE = 0.0
MOST_SHARE = 0.95


class SftPSettings(AdapterAveraging, PersonalModelSettings):
    """Table ``[sft-p]``: client-conditioned structural masks, trained together with LoRA."""

    ROUNDS = 10
    WEIGHTS: ClassVar[tuple[str, ...]] = ("equal", "samples")
    READ_WITH: ClassVar[ReadWith] = {"validation-windows": {"task.name": (TEXT,)}}
    CHECKS_SITE = True

    share: float = Field(
        0.2,
        gt=LEAST_SHARE,
        le=MOST_SHARE,
        description=(
            "Share that every client prunes, where its own configuration (`pruned-share`) names"
            " none. A real site looks at these two alone."
        ),
    )
    shares: str = Field(
        "",
        description=(
            "`0.2,0.2,0.5,0.5`: shares of simulated clients, by number; the last one repeats."
            " Empty: `share`."
        ),
    )
    share_of: Literal["blocks", "model"] = Field(
        "blocks",
        description=(
            "Of what: of the blocks' matrices, or of all parameters, of which embeddings and norms"
            " stay (the paper's)."
        ),
    )
    conditioned: bool = Field(
        True,
        description=(
            "A client has an embedding of its own, which never leaves it; false: one constant for"
            " all (NOC)."
        ),
    )
    adapters: bool = Field(
        True, description="LoRA is trained beside the masks (A); false: masks alone (NOA)."
    )
    heads: Literal["per-gate", "shared"] = Field(
        "per-gate",
        description=(
            "Heads of the generator: one for each block and kind of lane, or one for each kind."
        ),
    )
    embedding: int = Field(32, ge=1, le=4096, description="Numbers of a client's embedding (d_e).")
    code: int = Field(
        32, ge=1, le=4096, description="Numbers of the learned code of each block and kind of lane."
    )
    width: int = Field(32, ge=1, le=4096, description="Width of the generator's hidden layer.")
    estimator: Literal["reinmax", "gumbel"] = Field(
        "reinmax",
        description=(
            "How gates get a gradient: ReinMax, or a straight-through sigmoid with two Gumbel"
            " noises' difference."
        ),
    )
    tau: float = Field(
        1.0,
        gt=0,
        description=(
            "Temperature of the estimator. The paper's 0.4 is right for `gumbel`; with `reinmax`"
            " gradients turn round."
        ),
    )
    norm: Literal["all", "read"] = Field(
        "all",
        description=(
            "Lanes that a norm sees: all, as in DISP-LLM's code, or those alone that are read"
            " behind it (equation 3)."
        ),
    )
    bias: float = Field(
        3.0,
        ge=-100,
        le=100,
        description="Constant in all logits (c): at first nearly all lanes are on.",
    )
    strength: float = Field(
        16.0, gt=0, le=1000, description="Weight of the budget in the training loss (lambda)."
    )
    learning_rate: float = Field(
        1e-3, gt=0, le=MOST_LEARNING_RATE, description="Learning rate of generator and embedding."
    )
    weight_decay: float = Field(
        0.05,
        ge=0,
        description=(
            "Weight decay of generator and embedding; times their learning rate and steps of a"
            " round it is at most 1."
        ),
    )
    schedule: Literal["constant", "training"] = Field(
        "constant",
        description=(
            "Their learning rate stays, as in the paper, or falls as `training.schedule` says,"
            " which LoRA's does."
        ),
    )
    masks: Literal["budget", "sign"] = Field(
        "budget",
        description=(
            "Lanes of the model that a client is left with: those of highest logit within its"
            " budget, or those whose logit is not negative."
        ),
    )

    late_clients: int = Field(
        0,
        ge=0,
        description=(
            "So many clients, those of the highest numbers, join when the rounds are over:"
            " generator and LoRA stay as they are, and such a client fits its own embedding alone."
        ),
    )
    late_steps: int = Field(
        200,
        ge=1,
        le=100_000,
        description=(
            "Steps in which a client that was in no round fits its embedding: a late one, or one"
            " that `sampled-clients` never drew."
        ),
    )
    validation_windows: int = Field(
        0,
        ge=0,
        description=(
            "Windows of its own held-out text on which a client measures its smaller model after"
            " every round it trains in. The figures stay with it; a simulation draws them. 0: none."
        ),
    )

    @field_validator("shares")
    @classmethod
    def _are_shares(cls, value: str) -> str:
        for part in value.split(",") if value.strip() else ():
            try:
                share = float(part)
                if not part.isascii():
                    raise ValueError
            except ValueError:
                raise ValueError(
                    f"{part.strip()!r} is no number; write shares with commas between them, for"
                    " instance 0.2,0.5"
                ) from None
            if not LEAST_SHARE < share <= MOST_SHARE:
                raise ValueError(
                    f"{part} is no share above {LEAST_SHARE:g} and up to {MOST_SHARE:g}"
                )
        return value.strip()

    @property
    def makes_alone(self) -> bool:
        """True if clients do work of their own after the rounds.

        They write their models, and late clients first fit their embeddings.
        """
        return self.late_clients > 0 or self.keep_models

    def asked_of_sites(self, run: "RunSettings") -> Mapping[str, tuple[str, int]]:
        """Return what one round of training demands of a site.

        In addition to the demands of all averaging methods: the steps of clients that took part in
        no round, and calibration samples of held-out text for validation.
        """
        asked = dict(super().asked_of_sites(run))
        passes = self.late_steps * run.training.accumulation
        if self.fits_alone(run.federation) and passes > asked["most_steps"][1]:
            own = f"{run.method}.late-steps x training.accumulation"
            asked["most_steps"] = (own, passes)
            asked["most_sequences"] = (
                f"{own} x training.batch-size",
                passes * run.training.batch_size,
            )
        if self.validation_windows:
            asked["most_windows"] = (f"{run.method}.validation-windows", self.validation_windows)
        return asked

    def fits_alone(self, federation: FederationSettings) -> bool:
        """Return whether late clients, and clients that no round drew, fit their embeddings.

        They do so only if clients do work of their own after the rounds (``makes_alone``).
        """
        return (
            self.conditioned
            and self.makes_alone
            and (self.late_clients > 0 or federation.sampled_clients < 1)
        )

    def is_late(self, client: int, enrolled: int) -> bool:
        """Return whether a client takes part in no round; at least one enrolled client does."""
        return client >= max(1, enrolled - self.late_clients)

    def share_of_client(self, client: int) -> float:
        """Return the pruning ratio of a simulated client; the last of ``shares`` repeats."""
        given = [float(part) for part in self.shares.split(",")] if self.shares else [self.share]
        return given[min(client, len(given) - 1)]

    def contradictions(
        self, method: str, federation: FederationSettings, lora: LoraSettings, num_clients: int
    ) -> list[str]:
        """Return one error line per conflict between these tables."""
        lines = super().contradictions(method, federation, lora, num_clients)
        if lora.merge:
            lines.append(
                f"lora.merge = true: clients of {method} end with models of different shapes, which"
                " stay there; set it to false"
            )
        if self.late_clients >= num_clients:
            lines.append(
                f"{method}.late-clients = {self.late_clients}: of {count(num_clients, 'client')}"
                " none is left for the rounds; lower it"
            )
        if self.late_clients and not self.conditioned:
            lines.append(
                f"{method}.late-clients = {self.late_clients}: without conditioning a late client"
                " has nothing to fit; set it to 0, or conditioned to true"
            )
        return lines
