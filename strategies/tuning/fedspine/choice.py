"""Choice of each device's pruning ratio and rank (FedSpine, stage 1): bandit, schedule or random.

A choice depends on the run's seed, the device, the round and the device's bandit. It does not
depend on other devices or on the order of the calls.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from espalier.methods.tuning.fedspine import FedSpineSettings
from espalier.seeds import derive_seed
from espalier.settings.run import RunSettings
from strategies.tuning.fedspine.bandit import ArmSpace, Bandit, Exploration, Refinement, step_for
from strategies.tuning.fedspine.reward import (
    Outcome,
    large_gain,
    literal_rewards,
    scaled_rewards,
    with_gains,
)

ROUNDING = 1e-9
"""Distance to the target within which a schedule has reached it."""

MIN_RANK = 2
"""Minimum rank that is chosen."""


@dataclass(frozen=True)
class Arm:
    """Request to a device in a round, and the point that led to it."""

    u: float
    v: float
    """Second coordinate of the point (u, v); without effect if the schedule decides."""
    before: float
    """Pruning ratio p_{t-1} that was requested before."""
    pruned: float
    """Requested pruning ratio p_t."""
    rank: int
    """Requested rank r_t."""


@dataclass
class Choices:
    """Requests to all devices, and the state of their bandits."""

    settings: RunSettings
    target: float
    """Target pruning ratio p* of the parameters of prunable groups."""
    bandits: dict[int, Bandit] = field(default_factory=dict)
    pruned: dict[int, float] = field(default_factory=dict)
    """Pruning ratio of each device that has trained in a round."""
    gains: list[list[float]] = field(default_factory=list)
    """Relative decreases of the loss of all devices in the last rounds."""

    @property
    def job(self) -> FedSpineSettings:
        """Settings of the method."""
        return self.settings.of(FedSpineSettings)

    @property
    def rounds(self) -> int:
        """Number of pruning rounds T."""
        return self.job.rounds_of_pruning(self.settings.federation.rounds)

    @property
    def space(self) -> ArmSpace:
        """Arm space of a device."""
        largest = self.settings.lora.rank
        job = self.job
        lowest = min(MIN_RANK, largest)
        return ArmSpace(
            self.target, step_for(self.target, self.rounds), lowest, largest, job.arm_space
        )

    def knows(self, client: int) -> bool:
        """Return True if a device has trained in a round, and so has measured its groups."""
        return client in self.pruned

    def arm(self, client: int, server_round: int) -> Arm:
        """Return the request to a device."""
        job = self.job
        before = self.pruned.get(client, 0.0)
        # The same point for ratio and rank, even if the schedule decides one of them.
        u, v = self._point(client, server_round, before)
        chosen = self.space.refinement(u, v, before)
        usual = self.scheduled(before, server_round)
        ratio = chosen if job.allocation != "fixed" and job.adaptive_pruning else usual
        rank = chosen if job.allocation != "fixed" and job.adaptive_rank else usual
        return Arm(u, v, before, ratio.pruned, rank.rank)

    def _point(self, client: int, server_round: int, before: float) -> tuple[float, float]:
        min_u = self.space.least(before)
        seed = self.settings.seed
        if self.job.allocation == "bandit":
            return self._bandit(client).draw(seed, client, server_round, min_u)
        generator = np.random.default_rng(
            derive_seed(seed, "random-arm", client=client, server_round=server_round)
        )
        u, v = generator.random(2).tolist()
        # Uniform over the part that can still be played.
        return min_u + (1 - min_u) * u, v

    def scheduled(self, before: float, server_round: int) -> Refinement:
        """Return the fixed schedule: steps of ``p* / T`` from ``prune_from`` on, and one rank."""
        pruned = (
            before + self.target / self.rounds if server_round >= self.job.prune_from else before
        )
        return Refinement(
            # T steps of p* / T may miss p* by rounding.
            self.target if pruned > self.target - ROUNDING else pruned,
            self.job.usual_rank(self.settings.lora),
        )

    def _bandit(self, client: int) -> Bandit:
        job = self.job
        return self.bandits.get(
            client, Bandit(Exploration(job.discount, job.granularity, job.exploration))
        )

    # ----- learning -------------------------------------------------------------------------------

    def learn(
        self, arms: Mapping[int, Arm], outcomes: Mapping[int, Outcome], server_round: int
    ) -> dict[int, float]:
        """Update the bandits with the outcomes of a round, and return the rewards.

        A device that did not cut to the requested ratio does not update its bandit.
        """
        # Before the rewards, which relate a gain to those of the last rounds.
        self.gains = with_gains(self.gains, outcomes)
        job = self.job
        if job.reward == "scaled":
            # If only ranks are chosen, pruning steps say nothing about an arm.
            only_ranks = job.chooses and not job.chooses_ratios
            largest = self.space.largest_step
            rewards = scaled_rewards(
                outcomes,
                large_gain(self.gains),
                self.target,
                largest,
                of_steps=not only_ranks,
            )
        else:
            rewards = literal_rewards(outcomes)
        for client, outcome in outcomes.items():
            # The ratio counts in any case: it is where the next step starts.
            self.pruned[client] = outcome.pruned
            if (
                (arm := arms.get(client)) is not None
                # The arm's reward is that of the requested ratio; another one was not played.
                and outcome.pruned == arm.pruned
                and job.allocation == "bandit"
            ):
                self.bandits[client] = self._bandit(client).learn(
                    arm.u, arm.v, rewards[client], server_round
                )
        return rewards

    def to_json(self) -> dict[str, Any]:
        """Return the state for the checkpoint; it holds JSON values only."""
        return {
            "bandits": {
                str(client): bandit.to_json() for client, bandit in sorted(self.bandits.items())
            },
            "pruned": {str(client): pruned for client, pruned in sorted(self.pruned.items())},
            "gains": self.gains,
        }

    def restore(self, document: Any) -> None:
        """Restore the state that ``to_json`` returned."""
        self.bandits = {
            int(client): Bandit.from_json(bandit) for client, bandit in document["bandits"].items()
        }
        self.pruned = {int(client): pruned for client, pruned in document["pruned"].items()}
        self.gains = document["gains"]
