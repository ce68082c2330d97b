"""The learning rate of a step, over all rounds together."""

import math

from espalier.settings.training import TrainingSettings


def learning_rate(settings: TrainingSettings, step: int, total_steps: int) -> float:
    """Learning rate of step 0, 1, ... of ``total_steps``.

    It rises in ``warmup-steps`` equal stairs to its highest, and from there stays, or falls on a line or on half a cosine, so
    that the step after the last would have zero, as any later one has.
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
