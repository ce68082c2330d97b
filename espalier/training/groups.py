"""Groups of what is trained, each with a learning rate and a weight decay of its own.

    groups = [Group(names=[name for name in names if name.endswith(".lora_b")], rate=4.0)]

Every group has the bounds of the table ``[training]``: no group moves a number by more in a step, or forgets a round's first
steps sooner, than the table could by itself. A server that bounds what training can have led to takes a group's settings, too.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from pydantic import ValidationError

from espalier.settings.mistakes import Mistake
from espalier.settings.table import mistake_lines
from espalier.settings.training import TrainingSettings


@dataclass(frozen=True)
class Group:
    """Parameters that are trained otherwise than ``[training]`` says; what is in no group is trained as it says."""

    names: Collection[str]
    """In any order."""
    rate: float = 1.0
    """Times ``training.learning-rate``; the warm-up is the run's."""
    weight_decay: float | None = None
    """In place of ``training.weight-decay``; None leaves that."""
    schedule: str | None = None
    """In place of ``training.schedule``; None leaves that."""

    def settings(self, training: TrainingSettings) -> TrainingSettings:
        """The table as it is for this group.

        Raises
        ------
        Mistake
            The group's learning rate or weight decay is beyond what the table allows.
        """
        changes: dict[str, float | str] = {"learning-rate": training.learning_rate * self.rate}
        if self.weight_decay is not None:
            changes["weight-decay"] = self.weight_decay
        if self.schedule is not None:
            changes["schedule"] = self.schedule
        try:
            return TrainingSettings.model_validate(training.model_dump(by_alias=True) | changes)
        except ValidationError as error:
            told = "; ".join(mistake_lines(error, list(training.model_dump(by_alias=True))))
            decay = training.weight_decay if self.weight_decay is None else self.weight_decay
            of = (
                f"{self.rate:g} x training.learning-rate = {training.learning_rate:g} and weight"
                f" decay {decay:g}"
            )
            raise Mistake(f"training: of a group with {of}: {told}") from None


def grouped(
    names: Iterable[str], groups: Sequence[Group], training: TrainingSettings
) -> list[tuple[list[str], TrainingSettings]]:
    """Names with the settings that hold for them: each group's, and last those of no group; sorted, none of them empty.

    Raises
    ------
    ValueError
        A group names what is not among the names, or two groups name the same.
    Mistake
        See ``Group.settings``.
    """
    left = set(names)
    found = list[tuple[list[str], TrainingSettings]]()
    for group in groups:
        if strange := sorted(set(group.names) - left):
            raise ValueError(f"{', '.join(strange)}: is not trained, or in two groups")
        left -= set(group.names)
        found.append((sorted(set(group.names)), group.settings(training)))
    return [(few, settings) for few, settings in [*found, (sorted(left), training)] if few]
