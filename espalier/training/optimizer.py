"""Parameter groups of AdamW, and the learning-rate schedule over the steps of all rounds.

    groups = [Group(names=[name for name in names if name.endswith(".lora_b")], rate=4.0)]

The bounds of the table ``[training]`` hold for every group. No group can change a parameter more in
a step, or decay earlier steps of a round faster, than the table itself could. A server that limits
the updates of clients considers a group's settings too.
"""

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from pydantic import ValidationError

from espalier.errors import InputError
from espalier.settings.table import mistake_lines
from espalier.settings.tables.training import TrainingSettings


@dataclass(frozen=True)
class Group:
    """Parameters whose training differs from ``[training]``; all others follow the table."""

    names: Collection[str]
    """Names of the parameters, in any order."""
    rate: float = 1.0
    """Factor on ``training.learning-rate``."""
    weight_decay: float | None = None
    """Weight decay of the group; None: ``training.weight-decay``."""
    schedule: str | None = None
    """Schedule of the group; None: ``training.schedule``."""

    def settings(self, training: TrainingSettings) -> TrainingSettings:
        """Return the table ``[training]`` with the changes of this group; see ``grouped``."""
        changes: dict[str, float | str] = {"learning-rate": training.learning_rate * self.rate}
        if self.weight_decay is not None:
            changes["weight-decay"] = self.weight_decay
        if self.schedule is not None:
            changes["schedule"] = self.schedule
        try:
            return TrainingSettings.model_validate(training.model_dump(by_alias=True) | changes)
        except ValidationError as error:
            mistakes = "; ".join(mistake_lines(error, list(training.model_dump(by_alias=True))))
            decay = training.weight_decay if self.weight_decay is None else self.weight_decay
            values = (
                f"{self.rate:g} x training.learning-rate = {training.learning_rate:g} and weight"
                f" decay {decay:g}"
            )
            raise InputError(f"training: of a group with {values}: {mistakes}") from None


def grouped(
    names: Iterable[str], groups: Sequence[Group], training: TrainingSettings
) -> list[tuple[list[str], TrainingSettings]]:
    """Return (names, settings) of each group, and last those of the names without a group.

    Names are sorted, and empty groups are left out.

    Raises
    ------
    ValueError
        A group has an unknown name, or two groups have the same name.
    InputError
        A group's learning rate or weight decay exceeds the bounds of ``[training]``.
    """
    ungrouped = set(names)
    pairs = list[tuple[list[str], TrainingSettings]]()
    for group in groups:
        if invalid := sorted(set(group.names) - ungrouped):
            raise ValueError(f"{', '.join(invalid)}: is not trained, or in two groups")
        ungrouped -= set(group.names)
        pairs.append((sorted(set(group.names)), group.settings(training)))
    return [
        (group_names, settings)
        for group_names, settings in [*pairs, (sorted(ungrouped), training)]
        if group_names
    ]


def learning_rate(settings: TrainingSettings, step: int, total_steps: int) -> float:
    """Return the learning rate of a step, counted from 0, out of ``total_steps``.

    It is constant, or falls linearly or as half a cosine to zero at step ``total_steps`` and after
    it.
    """
    # After the last step the rate stays at the end of the schedule.
    progress = min(1.0, step / max(1, total_steps))
    if settings.schedule == "linear":
        return settings.learning_rate * (1 - progress)
    if settings.schedule == "cosine":
        return settings.learning_rate * (1 + math.cos(math.pi * progress)) / 2
    return settings.learning_rate
