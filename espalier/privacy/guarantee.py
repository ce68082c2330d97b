"""Guarantee of a private run: what each answer of a client draws, and what all of them promise."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from espalier.privacy.accounting import Draw, epsilon_of, noise_multiplier
from espalier.settings.run import RunSettings


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
            "neighbours": "one record or group of a site added or removed",
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
    trains = run.job.MECHANISM == "dp-sgd"
    answers = run.federation.rounds if trains else 1
    steps = run.training.steps if trains else 1
    noise = noise_multiplier(privacy.epsilon, privacy.delta, rate, steps * answers)
    return Guarantee(Draw(noise, rate, steps), answers, privacy.delta, privacy.noise)


def in_words(guarantee: Mapping[str, Any]) -> str:
    """Return the guarantee of ``to_json`` in one sentence, for people."""
    text = (
        f"epsilon {guarantee['epsilon']:.3g} at delta {guarantee['delta']:g} for each record or"
        " group of a site, for all replies of the site in this run together"
    )
    if guarantee["noise"] == "seed":
        text += "; the noise is made from the run's seed, so it protects nothing (simulation)"
    return text
