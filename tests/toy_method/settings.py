"""Settings of the toy."""

from typing import ClassVar

from pydantic import Field

from espalier.settings.method import MethodSettings


class ToySettings(MethodSettings):
    """Table ``[toy]``."""

    FEDERATION: ClassVar[tuple[str, ...]] = ("rounds",)
    ROUNDS = 2

    strength: float = Field(
        0.1, gt=0, le=1, description="How far the average vector moves the model."
    )
