"""Who chooses what a device is asked for in a round (FedSpine, stage 1): its bandit, a schedule, or chance.

A choice follows from the run's seed, the device, the round and what the device's bandit has learned; what others do plays no
part, nor does the order in which they are asked.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from espalier.settings.fedspine import FedSpineSettings
from espalier.settings.mistakes import Mistake
from espalier.settings.run import RunSettings
from espalier.settings.seeds import derive_seed
from strategies.methods.bandit import Bandit, Exploration
from strategies.methods.refining_arms import ArmSpace, Refinement, step_for
from strategies.methods.refining_reward import Outcome, UsualGains, literal_rewards, scaled_rewards

ROUNDING = 1e-9
"""So near to the target a schedule is there."""


@dataclass(frozen=True)
class Arm:
    """What a device is asked for in a round, and why."""

    u: float
    v: float
    """The point of the square; without effect where nothing is chosen."""
    before: float
    """p_{t-1} that it was asked for."""
    pruned: float
    """p_t."""
    rank: int
    """r_t."""


@dataclass
class Choices:
    """What all devices are asked for, and what their bandits know.

    Parameters
    ----------
    settings : of the run
    target : p*, of the parameters of groups and channels
    """

    settings: RunSettings
    target: float
    bandits: dict[int, Bandit] = field(default_factory=dict)
    pruned: dict[int, float] = field(default_factory=dict)
    """p that each device came to, of those that have trained in a round."""
    usual: UsualGains = field(default_factory=UsualGains)

    @property
    def job(self) -> FedSpineSettings:
        """The method's table."""
        return self.settings.of(FedSpineSettings)

    @property
    def rounds(self) -> int:
        """Of pruning."""
        return self.job.rounds_of_pruning(self.settings.federation.rounds)

    @property
    def space(self) -> ArmSpace:
        """What the points of the square mean."""
        largest = self.settings.lora.largest_rank
        job = self.job
        lowest = min(job.rank_min, largest)
        return ArmSpace(
            self.target, step_for(self.target, self.rounds), lowest, largest, job.arm_space
        )

    def knows(self, client: int) -> bool:
        """Whether a device has trained in a round, and so has measured its units."""
        return client in self.pruned

    def arm(self, client: int, server_round: int) -> Arm:
        """What a device is asked for."""
        job = self.job
        before = self.pruned.get(client, 0.0)
        u, v = self._point(client, server_round, before)
        chosen = self.space.refinement(u, v, before)
        usual = self._scheduled(before, server_round)
        ratio = chosen if job.allocation != "fixed" and job.adaptive_pruning else usual
        rank = chosen if job.allocation != "fixed" and job.adaptive_rank else usual
        return Arm(u, v, before, ratio.pruned, rank.rank)

    def _point(self, client: int, server_round: int, before: float) -> tuple[float, float]:
        least = self.space.least(before)
        seed = self.settings.seed
        if self.job.allocation == "bandit":
            return self._bandit(client).draw(seed, client, server_round, least)
        generator = np.random.default_rng(
            derive_seed(seed, "random-arm", client=client, server_round=server_round)
        )
        u, v = generator.random(2).tolist()
        return least + (1 - least) * u, v

    def _scheduled(self, before: float, server_round: int) -> Refinement:
        """The same step for all, ``p* / T``, from a round on, and one rank."""
        pruned = (
            before + self.target / self.rounds if server_round >= self.job.prune_from else before
        )
        return Refinement(
            self.target if pruned > self.target - ROUNDING else pruned,
            self.job.usual_rank(self.settings.lora),
        )

    def _bandit(self, client: int) -> Bandit:
        job = self.job
        return self.bandits.get(
            client, Bandit(Exploration(job.discount, job.granularity, job.exploration))
        )

    # ----- what came of it --------------------------------------------------------------------------------------------

    def learn(
        self, arms: Mapping[int, Arm], outcomes: Mapping[int, Outcome], server_round: int
    ) -> dict[int, float]:
        """Take what a round came to, and return its rewards; a device that did not cut as it was asked teaches nothing."""
        self.usual = self.usual.and_of(outcomes)
        job = self.job
        if job.reward == "scaled":
            ranks_alone = job.chooses and not job.chooses_ratios
            largest = self.space.largest_step
            rewards = scaled_rewards(
                outcomes, self.usual, self.target, largest, job.kappa, of_steps=not ranks_alone
            )
        else:
            rewards = literal_rewards(outcomes)
        for client, outcome in outcomes.items():
            self.pruned[client] = outcome.pruned
            if (
                (arm := arms.get(client)) is not None
                and outcome.pruned == arm.pruned
                and job.allocation == "bandit"
            ):
                self.bandits[client] = self._bandit(client).learn(
                    arm.u, arm.v, rewards[client], server_round
                )
        return rewards

    # ----- as text ----------------------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """JSON values."""
        return {
            "bandits": {
                str(client): bandit.to_json() for client, bandit in sorted(self.bandits.items())
            },
            "pruned": {str(client): pruned for client, pruned in sorted(self.pruned.items())},
            "usual": self.usual.to_json(),
        }

    def restore(self, document: Any) -> None:
        """Take over what ``to_json`` returned; ``Mistake`` where it is something else."""
        try:
            self.bandits = {
                int(client): Bandit.from_json(bandit)
                for client, bandit in document["bandits"].items()
            }
            self.pruned = {
                int(client): float(pruned) for client, pruned in document["pruned"].items()
            }
            self.usual = UsualGains.from_json(document["usual"])
        except (KeyError, TypeError, AttributeError):
            raise Mistake(
                "the choices in the checkpoint are damaged; resume from another run directory"
            ) from None


def arms_to_json(arms: Mapping[int, Arm]) -> dict[str, Any]:
    """JSON values."""
    return {str(client): asdict(arm) for client, arm in sorted(arms.items())}


def arms_from_json(document: Mapping[str, Any]) -> dict[int, Arm]:
    """Read what ``arms_to_json`` returned; ``Mistake`` where it is something else."""
    try:
        return {int(client): Arm(**arm) for client, arm in document.items()}
    except (TypeError, ValueError, AttributeError):
        raise Mistake(
            "the choices in the checkpoint are damaged; resume from another run directory"
        ) from None
