"""FedSpine: settings and contracts. Every device alternately prunes and tunes its model.

A bandit of its own chooses each device's pruning ratio and LoRA rank. A device's cut is agreed
first, then adapters of its shape are exchanged.

From round 2 on, the first ``push`` of a round asks a device to cut its model to a pruning ratio.
The device replies with a bit per prunable group: 1 = cut. Every later request of the round includes
these bits, so that all tensor shapes are a function of the request, even at a site that lost its
state. Importance scores never leave the device.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator

from espalier.amounts import count
from espalier.errors import ProtocolError
from espalier.messages.blobs.cut_bits import bit_specs, read_bits, require_step
from espalier.messages.contract import Contract, Side
from espalier.messages.evaluation import LOSS_DIGITS, MAX_LOSS
from espalier.messages.message import Fields, Kind, MessageBody, NoFields, validate
from espalier.methods.tuning.adapters import contract as averaging
from espalier.methods.tuning.adapters import tensors
from espalier.methods.tuning.adapters.contract import ExtraBlobs, TuningReport
from espalier.methods.tuning.adapters.settings import AdapterAveraging
from espalier.models.adapters import AdapterPlan
from espalier.models.groups import Groups
from espalier.models.plan import ModelPlan, PlanOf
from espalier.models.structure import structured_plan
from espalier.settings.pruning import CutSettings, PersonalModelSettings, ratio_field
from espalier.settings.registry import Row
from espalier.settings.run import RunSettings
from espalier.settings.table import ReadWith
from espalier.settings.tables.federation import FederationSettings
from espalier.settings.tables.lora import LoraSettings

CHOSEN = ("bandit", "random")
"""Allocations that choose the pruning ratio and rank for each device."""
PLAYS_OF_CHANCE = 15
"""Number of choices up to which a bandit's regret is that of random choices, by our study."""


class FedSpineSettings(AdapterAveraging, CutSettings, PersonalModelSettings):
    """Table ``[fedspine]`` (Yao et al. 2025)."""

    FEDERATION: ClassVar[tuple[str, ...]] = (
        "rounds", "sampled-clients", "client-weights", "max-weight-ratio", "aggregation-rule",
        "max-update-ratio", "wire-dtype", "fleet",
    )  # fmt: skip
    RULES: ClassVar[tuple[str, ...]] = ("clipped-mean", "mean")
    WHY_NO_OTHER_RULE = (
        "devices keep different rows and choose different ranks, so that a coordinate exists at"
        " some of them only"
    )
    ROUNDS = 10
    FLEET = "full"
    WEIGHTS: ClassVar[tuple[str, ...]] = (
        "samples", "importance", "importance-samples", "equal",
    )  # fmt: skip
    """The first is better with uneven classes than ``importance``, which is the paper's."""
    READ_WITH: ClassVar[ReadWith] = {
        "arm-space": {"allocation": CHOSEN},
        "adaptive-pruning": {"allocation": CHOSEN},
        "adaptive-rank": {"allocation": CHOSEN},
        "discount": {"allocation": ("bandit",)},
        "granularity": {"allocation": ("bandit",)},
        "exploration": {"allocation": ("bandit",)},
    }

    pruning_ratio: float = ratio_field(ge=0, lt=1)
    prune_rounds: int = Field(
        0,
        ge=0,
        description=(
            "Number of rounds of pruning in which a device that always takes the middle step"
            " reaches `pruning.ratio`; the first is round 2, or `prune-from`."
            " 0: half of the rounds."
        ),
    )
    prune_from: int = Field(
        2,
        ge=2,
        description=(
            "First round of pruning if ratios follow the schedule; 2 if they are chosen. With"
            " `prune-rounds=1` everything is removed at once: in round 2 (pruned, then tuned), or"
            " in the last round (tuned, then pruned)."
        ),
    )
    allocation: Literal["bandit", "fixed", "random"] = Field(
        "bandit",
        description=(
            "Choice of a device's pruning ratio and rank in a round: by a bandit of its own, by a"
            " schedule that is the same for all devices, or at random. With 15 choices or fewer a"
            " bandit does no better than chance, and some devices prune less than asked; `fixed`"
            " prunes as much as asked."
        ),
    )
    arm_space: Literal["relative", "absolute"] = Field(
        "relative",
        description=(
            "Meaning of a chosen ratio: how much further to prune, or, as in the paper, the"
            " pruning ratio itself."
        ),
    )
    adaptive_pruning: bool = Field(
        True, description="Choose the pruning ratio; `false`: use the fixed schedule."
    )
    adaptive_rank: bool = Field(
        True, description="Choose the rank; `false`: use `rank` (the paper without A_T)."
    )
    rank: int = Field(
        0,
        ge=0,
        description="Rank in round 1, and in all rounds if ranks are not chosen; 0: `lora.rank`.",
    )
    discount: float = Field(
        0.98,
        gt=0,
        le=1,
        description=(
            "Discount factor (lambda): a reward of k rounds ago counts with its k-th power."
        ),
    )
    granularity: float = Field(
        0.4,
        gt=0,
        le=2,
        description=(
            "Diameter up to which a cell of the bandit's square is not divided further (delta)."
        ),
    )
    exploration: float = Field(
        0.01,
        ge=0,
        le=1e6,
        description=(
            "Exploration factor in the bandit's bound, 2 in the paper; larger values try uncertain"
            " arms more often."
        ),
    )
    reward: Literal["scaled", "literal"] = Field(
        "scaled",
        description=(
            "Reward of a device: the paper's four terms, each from 0 to 1, or its equation as it"
            " stands, which has no bound."
        ),
    )
    score: Literal["exact", "group", "mask"] = Field(
        "mask",
        description=(
            "Importance of a prunable group: the squared gradient of a mask on the group's output,"
            " as in APT; the sum of the squared first-order terms of its weights by LoRA's"
            " gradients (`exact`, the paper); or the square of their sum (`group`)."
        ),
    )
    normalise: bool = Field(
        False,
        description=(
            "Divide each matrix's importances by their norm before those of a group are added, as"
            " in LoRAPrune, which the paper follows."
        ),
    )
    eta: float = Field(
        0.9,
        ge=0.5,
        le=0.95,
        description="Weight of the previous steps in the moving average of importances.",
    )
    aggregation: Literal["coverage", "zero-fill"] = Field(
        "coverage",
        description=(
            "Devices in the average of a row of an update: those that kept the row, or all, with"
            " zeros from those that pruned it."
        ),
    )

    @property
    def has_local_baseline(self) -> bool:
        """True if devices write their models after the rounds, in a message of its own."""
        return self.keep_models

    @property
    def averages_updates(self) -> bool:
        """True: updates with different rows and ranks can only be averaged as products B A."""
        return True

    @property
    def chooses(self) -> bool:
        """True if ratios or ranks are chosen for each device."""
        return self.allocation in CHOSEN and (
            (self.adaptive_pruning and self.pruning_ratio > 0) or self.adaptive_rank
        )

    @property
    def chooses_ratios(self) -> bool:
        """True if the pruning ratio of each device is chosen; otherwise all follow the schedule."""
        return self.chooses and self.adaptive_pruning and self.pruning_ratio > 0

    def learns_nothing(self, federation: FederationSettings) -> bool:
        """Return whether bandits have too few rounds to do better than chance."""
        # Nothing is chosen in the first round, nor for devices that take no part.
        plays = (federation.rounds - 1) * federation.sampled_clients
        return self.chooses and self.allocation == "bandit" and plays <= PLAYS_OF_CHANCE

    def rounds_of_pruning(self, rounds: int) -> int:
        """Return the number of rounds in which the schedule prunes (T), by default half of all."""
        return self.prune_rounds or max(1, rounds // 2)

    def usual_rank(self, lora: LoraSettings) -> int:
        """Return the rank for devices whose rank is not chosen."""
        return self.rank or lora.rank

    def rank_limit_of(self, client: int, lora: LoraSettings) -> int:
        """Return the rank of a device's adapters in round 1."""
        return self.usual_rank(lora)

    def contradictions(
        self, method: str, federation: FederationSettings, lora: LoraSettings, num_clients: int
    ) -> list[str]:
        """Return one error line per conflict between these tables."""
        lines = super().contradictions(method, federation, lora, num_clients)
        max_rank = lora.rank
        if lora.merge:
            lines.append(
                f"lora.merge = true: clients of {method} end with models of different shapes, which"
                " stay there; set it to false"
            )
        if federation.rounds < 2:
            lines.append(
                f"federation.rounds = {federation.rounds}: {method} prunes from round 2 on; set it"
                " to 2 or more"
            )
        if self.rank > max_rank:
            lines.append(
                f"{method}.rank = {self.rank}: the adapters' largest rank is {max_rank}"
                " (lora.rank); lower it"
            )
        if self.allocation in CHOSEN and not self.chooses:
            lines.append(
                f"{method}.allocation = '{self.allocation}': neither ratio nor rank is chosen; set"
                f" {method}.allocation to fixed, or adaptive-rank or (with a pruning ratio above"
                " 0) adaptive-pruning to true"
            )
        if self.allocation == "bandit" and self.pruning_ratio == 0 and self.reward == "literal":
            lines.append(
                f"pruning.ratio = 0: {method}.reward = 'literal' is a multiple of what was pruned,"
                " so that all rewards would be 0; set the reward to scaled"
            )
        if self.chooses_ratios and self.prune_from > 2:
            lines.append(
                f"{method}.prune-from = {self.prune_from}: where ratios are chosen pruning begins"
                f" in round 2; set it to 2, or {method}.allocation to fixed, or"
                f" {method}.adaptive-pruning to false"
            )
        if self.pruning_ratio > 0 and not self.chooses_ratios:
            lines += self._schedule_too_long(method, federation.rounds)
        elif self.pruning_ratio > 0 and self.arm_space == "relative":
            lines += self._steps_too_small(method, federation.rounds)
        return lines

    def _steps_too_small(self, method: str, rounds: int) -> list[str]:
        """Return an error line if even the largest arms cannot reach the pruning ratio.

        The largest arm is twice the mean step, and round 1 only tunes.
        """
        steps = self.rounds_of_pruning(rounds)
        max_steps = 2 * (rounds - 1)
        if rounds < 2 or steps <= max_steps:
            return []
        return [
            f"{method}.prune-rounds = {steps}: in {count(rounds, 'round')} (federation.rounds) not"
            f" even the largest arms reach the pruning ratio; lower it to {max_steps} or less"
        ]

    def _schedule_too_long(self, method: str, rounds: int) -> list[str]:
        steps = self.rounds_of_pruning(rounds)
        if rounds < 2 or self.prune_from + steps - 1 <= rounds:
            return []
        prefix = f"{method}.prune-from = {self.prune_from}, " if self.prune_from > 2 else ""
        return [
            f"{prefix}{method}.prune-rounds = {self.prune_rounds or f'0, which is {steps}'}:"
            f" pruning would end in round {self.prune_from + steps - 1} of {rounds}"
            f" (federation.rounds), and no device reaches the pruning ratio; lower"
            f" {'one of them' if prefix else 'it'}"
        ]


STRUCTURE = "structure"
"""Key of the blob with the cut."""
TERM_DIGITS = 3
"""Significant digits of ``SpineReport.taylor``."""
MAX_TERM = 1e30
"""Maximum value of ``SpineReport.taylor``."""
SLACK = 1e-9
"""Tolerance for a pruning ratio whose terms were added in another order."""


class CutOrder(Fields):
    """Fields of a request to cut the model."""

    pruned: float = Field(ge=0, lt=1)
    """Pruning ratio p_t over all prunable groups, including those that were cut before."""


class SpineReport(TuningReport):
    """Fields of a reply with adapters."""

    loss_before: float = Field(ge=0, le=MAX_LOSS)
    """Mean loss of a few sequences before the round's training, in nats."""
    loss_after: float = Field(ge=0, le=MAX_LOSS)
    """Mean loss of the same sequences after it, in nats."""
    taylor: float = Field(ge=0, le=MAX_TERM)
    """First term of equation 14, averaged over the steps."""

    @field_validator("loss_before", "loss_after")
    @classmethod
    def _has_few_decimals(cls, loss: float) -> float:
        if loss != round(loss, LOSS_DIGITS):
            raise ValueError(f"more than {LOSS_DIGITS} decimals")
        return loss

    @field_validator("taylor")
    @classmethod
    def _has_few_digits(cls, taylor: float) -> float:
        if taylor != shortened(taylor):
            raise ValueError(f"more than {TERM_DIGITS} digits")
        return taylor


def shortened(term: float) -> float:
    """Return a term as it is sent: rounded to a few digits, so that it reveals little."""
    return float(f"{min(term, MAX_TERM):.{TERM_DIGITS}g}")


def trained(
    plan: ModelPlan, run: RunSettings, rank_limit: int | None = None, structure: bytes | None = None
) -> AdapterPlan:
    """Return the adapters of a device.

    Ranks and scalings are those of the uncut model; the shapes follow from the device's cut. An
    encoder's classification head reads features that no cut removes, so it is the same on every
    device.

    Parameters
    ----------
    plan : plan of the uncut model
    rank_limit : maximum rank; None for the ranks of the settings
    structure : blob with the device's cut; None for the uncut model
    """
    adapters = tensors.trained(plan, run, rank_limit)
    if structure is None:
        return adapters
    blocks = _smaller(plan, structure).blocks
    smaller_adapters = {
        index: tuple(
            replace(adapter, linear=blocks[index].linear(adapter.linear.name))
            for adapter in block_adapters
        )
        for index, block_adapters in adapters.blocks.items()
    }
    return replace(adapters, blocks=smaller_adapters)


@lru_cache(maxsize=64)
def _smaller(plan: ModelPlan, structure: bytes) -> ModelPlan:
    """Return the plan of the cut model.

    Raises ProtocolError if the blob is not a valid cut.
    """
    groups = Groups.of(plan)
    return structured_plan(plan, groups.structure(read_bits(groups, structure)))


def contract(request: MessageBody, plan_of: PlanOf, run: RunSettings) -> Contract:
    """Return the contract of a ``train`` message (part 0), or of a ``fetch`` of a later part."""
    return averaging.contract(
        request,
        plan_of,
        run,
        trained=partial(trained, structure=request.blobs.get(STRUCTURE)),
        kind_of_report=SpineReport,
        extra=_extra_blobs(plan_of()) if request.header.server_round > 1 else averaging.NOTHING,
        observer=OBSERVER,
    )


def push_contract(request: MessageBody, plan_of: PlanOf, run: RunSettings) -> Contract:
    """Return the contract of a ``push`` message: a request to cut, or a part of adapters.

    The adapters have the shapes of the device's cut. In a round, part 0 is the request to cut, and
    the adapters begin with part 1. The result is pushed with the number of the round after the last
    one; its adapters begin with part 0.
    """
    header = request.header
    # The result is pushed with the number of the round after the last one.
    in_a_round = header.server_round <= run.federation.rounds
    if in_a_round and header.part == 0:
        return _question(request, plan_of(), run)
    shapes = partial(trained, structure=request.blobs.get(STRUCTURE))
    return averaging.push_of(
        request, plan_of, run, shapes, _extra_blobs(plan_of()), int(in_a_round)
    )


def _extra_blobs(plan: ModelPlan) -> ExtraBlobs:
    groups = Groups.of(plan)
    return ExtraBlobs({STRUCTURE: bit_specs(groups)}, partial(_require_bits, groups))


def _require_bits(groups: Groups, _: str, blob: bytes) -> None:
    """Check a cut; the result is not kept, because only tensors are."""
    read_bits(groups, blob)


def _question(request: MessageBody, plan: ModelPlan, run: RunSettings) -> Contract:
    groups = Groups.of(plan)
    job = run.of(FedSpineSettings)
    cut_order = validate(CutOrder, request.fields)
    specs = {STRUCTURE: bit_specs(groups)}
    # Without the blob the request is refused anyway; this value is then not used.
    structure_blob = request.blobs.get(STRUCTURE)
    previous = groups.none if structure_blob is None else read_bits(groups, structure_blob)

    def within_the_share(order: CutOrder) -> None:
        if order.pruned > groups.wanted(job) + SLACK:
            raise ProtocolError(
                f"CutOrder: pruned is above the run's pruning ratio, {job.pruning_ratio:g}"
            )

    def is_a_step(_: str, blob: bytes) -> None:
        require_step(groups, previous, read_bits(groups, blob), cut_order.pruned, job)

    return Contract(
        kind="push",
        method=run.method,
        down=Side(CutOrder, specs, partial(_require_bits, groups), within_the_share),
        up=Side(NoFields, specs, is_a_step),
        observer=ASKED,
    )


ASKED = (
    "Which attention groups and feed-forward channels this client removes, one bit each: those"
    " whose weights matter least to its data. Importances never leave it, and it answers once per"
    " round. A client that lost its importances removes nothing, which shows that it lost them."
)
OBSERVER = (
    "Adapters of the client's smaller model, trained on its data: everything that is said about"
    " those of `fedpetuning` applies. The mean loss of a few of the round's sequences before"
    " and after its training, three decimals each, and a term of the importance of its LoRA"
    " modules, three digits. With `client-weights` = `samples` or `importance-samples` only: the"
    " number of training sequences. Also how many steps failed, and how long the training took."
)

EXAMPLES: dict[Kind, Mapping[str, Any]] = {**averaging.EXAMPLES, "push": {"pruned": 0.1}}
"""Example fields by kind; the contract of the kind depends on them."""


METHOD = Row(
    title=(
        "FedSpine (devices prune and tune in turn, by ratios and LoRA ranks that a bandit"
        " chooses for each)"
    ),
    settings=FedSpineSettings,
    strategy="strategies.tuning.fedspine.strategy:FedSpine",
    job="client_app.methods.tuning.fedspine",
    summands_reason=(
        "chooses a ratio and a rank for each client by its losses, and averages each row"
        " over the clients that kept it, weighted by the importance of each"
    ),
    push="client_app.methods.tuning.fedspine_cut:answer_push",
    dry_run="server_app.estimate.messages.tuning:DryFedSpine",
    work="server_app.estimate.work.tuning:Spined",
    outcome="server_app.artifacts.fedspine:RefinedOutcome",
    tunes=True,
    measured_by_round=True,
)
