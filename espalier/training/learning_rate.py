"""Learning-rate schedule over the steps of all rounds."""

import math

from espalier.settings.training import TrainingSettings


def learning_rate(settings: TrainingSettings, step: int, total_steps: int) -> float:
    """Return the learning rate of a step, counted from 0, out of ``total_steps``.

    It rises in ``warmup-steps`` equal steps to its maximum. Then it stays constant, or falls
    linearly or as half a cosine to zero at step ``total_steps`` and after it.
    """
    warmup = settings.warmup_steps
    if step < warmup:
        return settings.learning_rate * (step + 1) / warmup
    done = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    if settings.schedule == "linear":
        return settings.learning_rate * (1 - done)
    if settings.schedule == "cosine":
        return settings.learning_rate * (1 + math.cos(math.pi * done)) / 2
    return settings.learning_rate
