"""Settings of FedSpine: every device alternately prunes and tunes its model.

A bandit of its own chooses each device's pruning ratio and LoRA rank.
"""

from typing import ClassVar, Literal

from pydantic import Field

from espalier.amounts import count
from espalier.settings.federation import FederationSettings
from espalier.settings.fedpetuning import AdapterAveraging
from espalier.settings.lora import LoraSettings
from espalier.settings.personal import PersonalModelSettings
from espalier.settings.structured import CutSettings
from espalier.settings.table import ReadWith
from espalier.settings.timed import TimedSettings

AUTO = "auto"
MEASURED = "measured"
CHOSEN = ("bandit", "random")
"""Allocations that choose the pruning ratio and rank for each device."""


class FedSpineSettings(AdapterAveraging, CutSettings, PersonalModelSettings, TimedSettings):
    """Table ``[fedspine]`` (Yao et al. 2025)."""

    FEDERATION: ClassVar[tuple[str, ...]] = (
        "rounds", "sampled-clients", "client-weights", "max-weight-ratio", "max-update-ratio", "payload", "rounding",
    )  # fmt: skip
    ROUNDS = 10
    WEIGHTS: ClassVar[tuple[str, ...]] = ("importance", "samples", "equal")
    READ_WITH: ClassVar[ReadWith] = {
        "arm-space": {"allocation": CHOSEN},
        "adaptive-pruning": {"allocation": CHOSEN},
        "adaptive-rank": {"allocation": CHOSEN},
        "rank-min": {"allocation": CHOSEN, "adaptive-rank": (True,)},
        "discount": {"allocation": ("bandit",)},
        "granularity": {"allocation": ("bandit",)},
        "exploration": {"allocation": ("bandit",)},
        "kappa": {"reward": ("scaled",)},
    }

    share: float = Field(
        0.3,
        ge=0,
        lt=1,
        description=(
            "Share of the parameters that every device ends without (p*), at least, and with"
            " `selection` of `kind` or `block` less than one unit beyond it of each kind in each"
            " block, or in each block. A unit is a key-value group of attention (a head, where each"
            " has its own keys and values) or a feed-forward channel. 0: nothing goes, and ranks"
            " alone are chosen (the paper without A_P)."
        ),
    )
    selection: Literal["global", "block", "kind"] = Field(
        "kind",
        description=(
            "Units that compete: groups and channels of each block by themselves (the paper's"
            " layers), those of a block, or all of the model. Importances of different kinds are"
            " hardly comparable."
        ),
    )
    prune_rounds: int = Field(
        0,
        ge=0,
        description=(
            "Rounds of pruning in which a device that always takes the middle step comes to"
            " `share`; the first is round 2, or `prune-from`. 0: half of the rounds."
        ),
    )
    prune_from: int = Field(
        2,
        ge=2,
        description=(
            "First round of pruning where ratios follow the schedule; 2 where they are chosen. With"
            " `prune-rounds=1` all goes at once: in round 2 (pruned, then tuned), or in the last"
            " round (tuned, then pruned)."
        ),
    )
    allocation: Literal["bandit", "fixed", "random"] = Field(
        "bandit",
        description=(
            "Who chooses a device's ratio and rank in a round: a bandit of its own, a schedule that"
            " is the same for all, or chance."
        ),
    )
    arm_space: Literal["relative", "absolute"] = Field(
        "relative",
        description=(
            "What is chosen of the ratio: how much further to prune, or, as the paper has it, the"
            " ratio itself."
        ),
    )
    adaptive_pruning: bool = Field(
        True, description="The ratio is chosen; false: the fixed schedule."
    )
    adaptive_rank: bool = Field(
        True, description="The rank is chosen; false: `rank` (the paper without A_T)."
    )
    rank: int = Field(
        0, ge=0, description="Rank in round 1, and wherever ranks are not chosen; 0: `lora.rank`."
    )
    rank_min: int = Field(
        2, ge=1, description="Lowest rank that is chosen; the highest is `lora.rank`."
    )
    discount: float = Field(
        0.98,
        gt=0,
        le=1,
        description="A reward of k rounds ago counts with the k-th power (lambda).",
    )
    granularity: float = Field(
        0.4,
        gt=0,
        le=2,
        description=(
            "A cell of the bandit's square that is not wider, corner to corner, is not cut (delta)."
        ),
    )
    exploration: float = Field(
        0.01,
        ge=0,
        le=1e6,
        description=(
            "Factor in the bandit's bound, 2 in the paper: how much it tries what it hardly knows."
        ),
    )
    reward: Literal["scaled", "literal"] = Field(
        "scaled",
        description=(
            "The paper's four terms, each from 0 to 1, or its equation as it stands, which has no"
            " bound."
        ),
    )
    kappa: float = Field(
        0.1,
        gt=0,
        le=1e6,
        description=(
            "A device that is off the mean time by this share of it gets half of the reward."
        ),
    )
    score: Literal["exact", "group", "mask"] = Field(
        "exact",
        description=(
            "What a unit is worth: the squares of its weights' first-order terms by LoRA's"
            " gradients, summed, as the paper has it; the square of their sum (`group`); or the"
            " square of the gradient of a mask on what the unit gives (`mask`), as in APT."
        ),
    )
    normalise: bool = Field(
        True,
        description=(
            "Each matrix's importances are divided by their norm before a unit's are added, as in"
            " LoRAPrune."
        ),
    )
    eta: float = Field(
        0.9,
        ge=0.5,
        le=0.95,
        description="Weight of the former steps in the moving average of importances.",
    )
    aggregation: Literal["coverage", "zero-fill"] = Field(
        "coverage",
        description=(
            "A row of an update counts with the devices that kept it, or with all, as zero where it"
            " was pruned."
        ),
    )
    fleet: str = Field(
        "auto",
        min_length=1,
        description=(
            "Devices that the run pretends to have, for the times that rewards look at: `full`,"
            " `low`, `medium` or `high` of `conf/devices`, or a file. `measured`: the seconds that"
            " clients measure, which differ from run to run. `auto`: `full` in simulation, and"
            " measured times in a deployment."
        ),
    )

    @property
    def makes_alone(self) -> bool:
        """True if devices write their models after the rounds, in a message of its own."""
        return self.keep_models

    @property
    def averages_updates(self) -> bool:
        """True: updates with different rows and ranks can only be averaged as products B A."""
        return True

    def svd_of(self, method: str) -> str:
        """Return the setting, in words, that implies an SVD: here the method itself."""
        return f"method = '{method}'"

    def fleet_name(self, *, simulation: bool) -> str:
        """Return the name of the run's fleet; empty if times are measured."""
        chosen = ("full" if simulation else MEASURED) if self.fleet == AUTO else self.fleet
        return "" if chosen == MEASURED else chosen

    @property
    def chooses(self) -> bool:
        """True if ratios or ranks are chosen for each device."""
        return self.allocation in CHOSEN and (
            (self.adaptive_pruning and self.share > 0) or self.adaptive_rank
        )

    @property
    def chooses_ratios(self) -> bool:
        """True if the pruning ratio of each device is chosen; otherwise all follow the schedule."""
        return self.chooses and self.adaptive_pruning and self.share > 0

    def rounds_of_pruning(self, rounds: int) -> int:
        """Return the number of rounds in which the schedule prunes (T), by default half of all."""
        return self.prune_rounds or max(1, rounds // 2)

    @property
    def limits_differ(self) -> bool:
        """True: ranks are chosen in every round, and groups that were cut have no adapter."""
        return True

    def usual_rank(self, lora: LoraSettings) -> int:
        """Return the rank that is used if none is chosen."""
        return self.rank or lora.largest_rank

    def rank_limit_of(self, client: int, lora: LoraSettings) -> int:
        """Return the rank of a device's adapters in round 1."""
        return self.usual_rank(lora)

    def contradictions(
        self, method: str, federation: FederationSettings, lora: LoraSettings, num_clients: int
    ) -> list[str]:
        """Return one error line per conflict between these tables."""
        lines = super().contradictions(method, federation, lora, num_clients)
        largest = lora.largest_rank
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
        if self.rank > largest:
            lines.append(
                f"{method}.rank = {self.rank}: the adapters' largest rank is {largest} (lora.rank);"
                " lower it"
            )
        if self.allocation in CHOSEN and not self.chooses:
            lines.append(
                f"{method}.allocation = '{self.allocation}': neither ratio nor rank is chosen; set"
                f" {method}.allocation to fixed, or adaptive-rank or (with a share above 0)"
                " adaptive-pruning to true"
            )
        if self.allocation == "bandit" and self.share == 0 and self.reward == "literal":
            lines.append(
                f"{method}.share = 0: {method}.reward = 'literal' is a multiple of what was pruned,"
                " so that all rewards would be 0; set the reward to scaled"
            )
        if self.chooses_ratios and self.prune_from > 2:
            lines.append(
                f"{method}.prune-from = {self.prune_from}: where ratios are chosen pruning begins"
                f" in round 2; set it to 2, or {method}.allocation to fixed, or"
                f" {method}.adaptive-pruning to false"
            )
        if self.share > 0 and not self.chooses_ratios:
            lines += self._schedule_too_long(method, federation.rounds)
        elif self.share > 0 and self.arm_space == "relative":
            lines += self._steps_too_small(method, federation.rounds)
        if self.allocation in CHOSEN and self.adaptive_rank and self.rank_min > largest:
            lines.append(
                f"{method}.rank-min = {self.rank_min}: the adapters' largest rank is {largest}"
                " (lora.rank); lower it"
            )
        return lines

    def _steps_too_small(self, method: str, rounds: int) -> list[str]:
        """Return an error line if even the largest arms cannot reach the pruning ratio.

        The largest arm is twice the mean step, and round 1 only tunes.
        """
        steps = self.rounds_of_pruning(rounds)
        most = 2 * (rounds - 1)
        if rounds < 2 or steps <= most:
            return []
        return [
            f"{method}.prune-rounds = {steps}: in {count(rounds, 'round')} (federation.rounds) not"
            f" even the largest arms come to the share; lower it to {most} or less"
        ]

    def _schedule_too_long(self, method: str, rounds: int) -> list[str]:
        steps = self.rounds_of_pruning(rounds)
        if rounds < 2 or self.prune_from + steps - 1 <= rounds:
            return []
        begun = f"{method}.prune-from = {self.prune_from}, " if self.prune_from > 2 else ""
        return [
            f"{begun}{method}.prune-rounds = {self.prune_rounds or f'0, which is {steps}'}: pruning"
            f" would end in round {self.prune_from + steps - 1} of {rounds} (federation.rounds),"
            f" and no device comes to the share; lower {'one of them' if begun else 'it'}"
        ]
