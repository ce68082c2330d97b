"""Guarantee of a private run: what each answer of a client draws, and what all of them promise."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from espalier.privacy.accounting import Draw, epsilon_of, noise_multiplier
from espalier.settings.run import RunSettings
from espalier.settings.tables.noise_share import NoiseShare


@dataclass(frozen=True)
class Guarantee:
    """Draws of a client's answers in a private run.

    They follow from the run's settings only, so they are the same for all clients, and the server
    and everybody else can compute them.
    """

    draw: Draw
    """Draw of each answer to a ``train`` request."""
    answers: int
    """Maximum number of such answers of a client."""
    delta: float
    noise: str
    """Source of noise and sampling, as ``privacy.noise``."""
    share: NoiseShare | None = None
    """Share of the noise that each site adds to a secure sum; None: each adds all of it."""

    @property
    def site_multiplier(self) -> float:
        """Noise multiplier of the noise that one site adds."""
        # A sum has the noise of all honest sites together, so variances add up to the whole.
        honest = self.share.honest_in_sum if self.share else 1
        return self.draw.noise_multiplier / math.sqrt(honest)

    @property
    def draws(self) -> list[Draw]:
        """Draws of all answers of a client."""
        return [self.draw] * self.answers

    @property
    def epsilon(self) -> float:
        """Epsilon of all answers of a client together."""
        return epsilon_of(self.draws, self.delta)

    def to_json(self) -> dict[str, Any]:
        """Return the entry of ``summary.json``."""
        return {
            "epsilon": self.epsilon,
            "delta": self.delta,
            "noise_multiplier": self.draw.noise_multiplier,
            "sampling_rate": self.draw.sampling_rate,
            "steps": self.draw.steps * self.answers,
            "noise": self.noise,
            "site_noise_multiplier": self.site_multiplier,
            "shared_noise": None if self.share is None else _shared(self.share),
            "neighbours": "one record or group of a site added or removed",
        }


def _shared(share: NoiseShare) -> dict[str, Any]:
    """Return on whom shared noise rests, as JSON."""
    return {
        "honest_fraction": share.honest_fraction,
        "sites": share.clients,
        "dishonest": share.dishonest,
        "least_of_sum": share.least_of_sum,
    }


def guarantee_of(run: RunSettings) -> Guarantee | None:
    """Return the guarantee of a run; None if it is not private.

    With ``dp-sgd`` every round has its steps. With ``sums`` there is one answer, all of whose
    vectors are one Gaussian mechanism.
    """
    privacy = run.privacy
    if not privacy.on:
        return None
    rate = privacy.rate(run.job.MECHANISM)
    # Training answers once per round, sums once in the run.
    trains = run.job.MECHANISM == "dp-sgd"
    answers = run.federation.rounds if trains else 1
    steps = run.training.steps if trains else 1
    noise = noise_multiplier(privacy.epsilon, privacy.delta, rate, steps * answers)
    share = (
        NoiseShare(run.num_clients, privacy.honest_fraction) if privacy.honest_fraction else None
    )
    return Guarantee(Draw(noise, rate, steps), answers, privacy.delta, privacy.noise, share)


def require_reachable_epsilon(run: RunSettings) -> None:
    """Raise InputError if no noise keeps a private run within its epsilon."""
    guarantee_of(run)


def in_words(guarantee: Mapping[str, Any]) -> str:
    """Return the guarantee of ``to_json`` in one sentence, for people."""
    text = (
        f"epsilon {guarantee['epsilon']:.3g} at delta {guarantee['delta']:g} for each record or"
        " group of a site, for all replies of the site in this run together"
    )
    if shared := guarantee.get("shared_noise"):
        text += (
            "; the sites share the noise, so it holds towards everybody who sees only their secure"
            f" sum, and works with at most {shared['dishonest']} of the {shared['sites']} sites"
        )
    if guarantee["noise"] == "seed":
        text += "; the noise is made from the run's seed, so it protects nothing (simulation)"
    return text
