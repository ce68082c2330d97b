"""SFT-P: settings and contracts.

Each client prunes its own model with masks that a shared generator computes from the client's
embedding. Clients send the generator, and LoRA if it is trained.

Embedding, masks and budget of a client never leave it.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from espalier.amounts import count
from espalier.messages.contract import Contract
from espalier.messages.message import Kind, MessageBody
from espalier.messages.sums.summands import SumSpecs
from espalier.methods.tuning.adapters import contract as averaging
from espalier.methods.tuning.adapters.settings import AdapterAveraging
from espalier.methods.tuning.adapters.summands import value_specs
from espalier.models.adapters import AdapterPlan, adapter_plan
from espalier.models.mask_generator import GeneratorShape
from espalier.models.plan import ModelPlan, PlanOf
from espalier.settings.method import numbers_of_clients, of_client
from espalier.settings.pruning import PersonalModelSettings, ratio_field
from espalier.settings.registry import Row
from espalier.settings.run import RunSettings
from espalier.settings.table import ReadWith
from espalier.settings.tables.federation import FederationSettings
from espalier.settings.tables.lora import LoraSettings
from espalier.settings.tables.task import TEXT
from espalier.settings.tables.training import MAX_LEARNING_RATE

MIN_RATIO = 0.0
MAX_RATIO = 0.95

WIDTH = 32
"""Width of the generator's hidden layer."""

BIAS = 3.0
"""Constant that is added to all logits (c); it keeps nearly all residual dimensions at first."""

WEIGHT_DECAY = 0.05
"""Weight decay of generator and embedding."""


class SftPSettings(AdapterAveraging, PersonalModelSettings):
    """Table ``[sft-p]``: client-conditioned structural masks, trained together with LoRA."""

    ROUNDS = 10
    FEDERATION: ClassVar[tuple[str, ...]] = (*AdapterAveraging.FEDERATION, "secure-sum")
    WEIGHTS: ClassVar[tuple[str, ...]] = ("equal", "samples")
    READ_WITH: ClassVar[ReadWith] = {"validation-samples": {"task.name": (TEXT,)}}
    CHECKS_SITE = True

    pruning_ratio: float = ratio_field(gt=MIN_RATIO, le=MAX_RATIO)
    ratios: Annotated[str, numbers_of_clients(MIN_RATIO, MAX_RATIO, "0.2,0.5")] = Field(
        "",
        description=(
            "Pruning ratios of simulated clients by number, for instance `0.2,0.2,0.5,0.5`; the"
            " last one repeats. Empty: `pruning.ratio`."
        ),
    )
    ratio_of: Literal["blocks", "model"] = Field(
        "blocks",
        description=(
            "Parameters to which the pruning ratio refers: the blocks' matrices, or all"
            " parameters, of which embeddings and norms stay (the paper's)."
        ),
    )
    conditioned: bool = Field(
        True,
        description=(
            "Give each client an embedding of its own, which never leaves it; `false`: one"
            " constant for all clients (NOC)."
        ),
    )
    adapters: bool = Field(
        True,
        description="Train LoRA together with the masks (A); `false`: train only the masks (NOA).",
    )
    heads: Literal["per-gate", "shared"] = Field(
        "per-gate",
        description=(
            "Heads of the generator: one for each gate, that is each block and kind of residual"
            " dimensions, or one for each kind."
        ),
    )
    embedding: int = Field(32, ge=1, le=4096, description="Size of a client's embedding (d_e).")
    embedding_deviation: float = Field(
        0.1,
        gt=0,
        le=10,
        description=(
            "Standard deviation of the initial embeddings. The paper gives none; codes have 0.1."
        ),
    )
    budget_input: float = Field(
        0.0,
        ge=0,
        le=100,
        description=(
            "Factor of each client's budget as another input of the generator: the logarithm of"
            " what the client keeps, divided by what `pruning.ratio` keeps. The budget never leaves"
            " the client. 0: no such input, as in the paper."
        ),
    )
    code: int = Field(
        32,
        ge=1,
        le=4096,
        description="Size of the learned code of each block and kind of residual dimensions.",
    )
    estimator: Literal["reinmax", "gumbel"] = Field(
        "reinmax",
        description=(
            "Gradient estimator of the gates: ReinMax, or a straight-through sigmoid with the"
            " difference of two Gumbel noises."
        ),
    )
    tau: float = Field(
        1.0,
        gt=0,
        description=(
            "Temperature of the estimator. The paper's 0.4 suits `gumbel`; with `reinmax` it"
            " reverses gradients."
        ),
    )
    norm: Literal["all", "read"] = Field(
        "all",
        description=(
            "Residual dimensions that a norm sees: all, as in DISP-LLM's code, or only those that"
            " are read after it (equation 3)."
        ),
    )
    strength: float = Field(
        16.0,
        gt=0,
        le=1000,
        description=(
            "Weight of the budget in the loss (lambda); the loss compares T(g) of each local step's"
            " draw with it."
        ),
    )
    learning_rate: float = Field(
        1e-3,
        gt=0,
        le=MAX_LEARNING_RATE,
        description=(
            "Learning rate of generator and embedding, constant as in the paper; their weight decay"
            " is 0.05. `training.schedule` applies to LoRA."
        ),
    )
    masks: Literal["budget", "sign"] = Field(
        "budget",
        description=(
            "Residual dimensions of a client's final model: those with the highest logits, so that"
            " T(g) of the final masks is within its budget, or those whose logit is not negative."
        ),
    )

    late_clients: int = Field(
        0,
        ge=0,
        description=(
            "Number of clients, those with the highest numbers, that join after the rounds."
            " Generator and LoRA then stay as they are, and such a client fits only its own"
            " embedding."
        ),
    )
    late_steps: int = Field(
        200,
        ge=1,
        le=100_000,
        description=(
            "Number of steps in which a client that took part in no round fits its embedding: a"
            " late client, or one that `sampled-clients` never drew."
        ),
    )
    validation_samples: int = Field(
        0,
        ge=0,
        description=(
            "Number of samples of its own held-out text on which a client evaluates its smaller"
            " model after every round in which it trains. The results stay at the client; a"
            " simulation plots them. 0: none."
        ),
    )

    @property
    def has_local_baseline(self) -> bool:
        """True if clients do work of their own after the rounds.

        They write their models, and late clients first fit their embeddings.
        """
        return self.late_clients > 0 or self.keep_models

    def asked_of_sites(self, run: RunSettings) -> Mapping[str, tuple[str, int]]:
        """Return what one round of training demands of a site.

        In addition to the demands of all averaging methods: the steps of clients that took part in
        no round, and calibration samples of held-out text for validation.
        """
        demands = dict(super().asked_of_sites(run))
        passes = self.late_steps * run.training.accumulation
        if self.fits_local_baseline(run.federation) and passes > demands["max_steps"][1]:
            demands["max_steps"] = (f"{run.method}.late-steps x training.accumulation", passes)
        if self.validation_samples:
            demands["max_samples"] = (f"{run.method}.validation-samples", self.validation_samples)
        return demands

    def fits_local_baseline(self, federation: FederationSettings) -> bool:
        """Return whether late clients, and clients that no round drew, fit their embeddings.

        They do so only if clients do work of their own after the rounds (``makes_local_baseline``).
        """
        return (
            self.conditioned
            and self.has_local_baseline
            and (self.late_clients > 0 or federation.sampled_clients < 1)
        )

    def is_late(self, client: int, enrolled: int) -> bool:
        """Return whether a client takes part in no round; at least one enrolled client does."""
        return client >= max(1, enrolled - self.late_clients)

    def pruning_ratio_of_client(self, client: int) -> float:
        """Return the pruning ratio of a simulated client; the last of ``ratios`` repeats."""
        return float(of_client(self.ratios or str(self.pruning_ratio), client))

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


def shape_of(run: RunSettings) -> GeneratorShape:
    """Return the sizes of the generator that the settings describe."""
    job = run.of(SftPSettings)
    return GeneratorShape(job.embedding, job.code, WIDTH, job.heads, int(job.budget_input > 0))


def lora_plan(plan: ModelPlan, run: RunSettings, rank_limit: int | None = None) -> AdapterPlan:
    """Return the LoRA adapters that are trained with the masks; none without ``adapters``."""
    adapters = adapter_plan(plan, run.of(AdapterAveraging).lora_of(run.lora, len(plan.blocks)))
    adapters = adapters if rank_limit is None else adapters.limited(rank_limit)
    return adapters if run.of(SftPSettings).adapters else replace(adapters, blocks={})


def trained(plan: ModelPlan, run: RunSettings, rank_limit: int | None = None) -> AdapterPlan:
    """Return all shared tensors: LoRA, and the generator's tensors, which are trained whole."""
    return replace(lora_plan(plan, run, rank_limit), whole=shape_of(run).shapes(plan))


def contract(request: MessageBody, plan_of: PlanOf, run: RunSettings) -> Contract:
    """Return the contract of a ``train`` message (part 0), or of a ``fetch`` of a later part."""
    return averaging.contract(request, plan_of, run, trained=trained, observer=OBSERVER)


def push_contract(request: MessageBody, plan_of: PlanOf, run: RunSettings) -> Contract:
    """Return the contract of a ``push`` message with a part of the generator and LoRA.

    After the last round, each client makes its personal model from them.
    """
    return averaging.push_of(request, plan_of, run, trained)


OBSERVER = (
    "A generator of masks, and LoRA if it is trained. Their differences from what was sent to the"
    " client are sums of the optimiser's steps on its data, at its own masks. As with LoRA,"
    " training text can be recovered in part. More tokens (the site's `min-tokens`) and more"
    " steps make this harder, not impossible. The distance of the masks from the client's budget"
    " moves the generator, so the budget can be guessed. With `budget-input`, the weights of that"
    " input tell whether the client's ratio is below, equal to or above the run's. With"
    " `client-weights` = `samples` only: the number of training sequences. Also how many steps"
    " failed, and how long the training took."
)


def summands(server_round: int, plan: ModelPlan, run: RunSettings) -> SumSpecs:
    """Return the specs of weighted generator and LoRA as summands, and of the weight."""
    return value_specs(trained(plan, run), run)


EXAMPLES: dict[Kind, dict[str, Any]] = averaging.EXAMPLES
"""Example fields by kind; the contract of the kind depends on them."""


METHOD = Row(
    title=(
        "SFT-P (every client prunes for itself, by masks of a shared generator, trained"
        " together with LoRA)"
    ),
    settings=SftPSettings,
    strategy="strategies.tuning.sft_p:SftP",
    job="client_app.methods.tuning.sft_p",
    summands=summands,
    to_summands="client_app.summands.adapters:of_adapters",
    dry_run="server_app.estimate.messages.tuning:DryTuning",
    work="server_app.estimate.work.tuning:Masked",
    outcome="server_app.artifacts.personal_models:PersonalMasksOutcome",
    tunes=True,
)
