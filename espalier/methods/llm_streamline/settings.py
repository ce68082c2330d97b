"""Settings of LLM-Streamline: adjacent blocks that hardly change their input are removed.

One trained layer can take their place.
"""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, ValidationError, model_validator

from espalier.amounts import count
from espalier.errors import InputError
from espalier.settings.federation import FederationSettings
from espalier.settings.structured import SmallerSettings
from espalier.settings.table import ReadWith
from espalier.settings.training import MAX_LEARNING_RATE, TrainingSettings

if TYPE_CHECKING:
    from espalier.settings.run import RunSettings

WEIGHT_DECAY = 1e-3
"""Weight decay of AdamW."""

WITH_A_LAYER = {"replacement": ("layer",)}


class LlmStreamlineSettings(SmallerSettings):
    """Table ``[llm-streamline]`` (Chen et al. 2025, section 2)."""

    FEDERATION: ClassVar[tuple[str, ...]] = (
        "rounds", "client-weights", "max-weight-ratio", "max-update-ratio", "wire-dtype",
    )  # fmt: skip
    ROUNDS: ClassVar[int] = 3
    WEIGHTS: ClassVar[tuple[str, ...]] = ("samples", "equal")
    FIRST_DELIVERY: ClassVar[int] = 2
    ROUNDS_THAT_DIFFER: ClassVar[tuple[int, ...]] = (1, 2)
    READ_WITH: ClassVar[ReadWith] = dict.fromkeys(
        ("steps", "batch-size", "learning-rate"),
        WITH_A_LAYER,
    )

    pruning_ratio: float = Field(
        0.2,
        gt=0,
        lt=1,
        description=(
            "Fraction of the blocks by which the model becomes shorter, rounded up to whole blocks."
        ),
    )
    replacement: Literal["layer", "none"] = Field(
        "layer",
        description=(
            "Replacement of the removed blocks: one trained layer, for which one more block is"
            " removed, or nothing."
        ),
    )
    last_hidden_state: Literal["after-norm", "before-norm"] = Field(
        "after-norm",
        description=(
            "Hidden state that counts as the last block's output when blocks are compared:"
            " `after-norm`, after the model's final norm, as in the published code; `before-norm`,"
            " the output itself."
        ),
    )
    steps: int = Field(
        50,
        ge=1,
        description="Number of optimiser steps of a client in each round that trains the layer.",
    )
    batch_size: int = Field(8, ge=1, description="Number of samples in an optimiser step.")
    learning_rate: float = Field(
        2e-4,
        gt=0,
        le=MAX_LEARNING_RATE,
        description="Maximum learning rate of AdamW; it falls as a cosine over all rounds.",
    )

    @model_validator(mode="after")
    def _trains_as_others_do(self) -> "LlmStreamlineSettings":
        try:
            _ = self.training
        except ValidationError as error:
            raise ValueError(error.errors()[0]["msg"].removeprefix("Value error, ")) from None
        return self

    @property
    def training(self) -> TrainingSettings:
        """Training of the replacement layer as a ``[training]`` table."""
        return TrainingSettings(
            steps=self.steps,
            batch_size=self.batch_size,
            learning_rate=self.learning_rate,
            schedule="cosine",
            weight_decay=WEIGHT_DECAY,
        )

    @property
    def compares_after_norm(self) -> bool:
        """True if the last block's output is compared after the model's final norm."""
        return self.last_hidden_state == "after-norm"

    @property
    def has_local_baseline(self) -> bool:
        """True if a layer is trained: a local baseline then trains a layer of its own.

        Without a layer, a client's own choice of blocks needs no message.
        """
        return self.replacement == "layer"

    def fewer_blocks(self, num_blocks: int) -> int:
        """Return by how many blocks the model becomes shorter.

        Raises
        ------
        InputError
            No block would be left.
        """
        # The small constant absorbs rounding errors of the product.
        fewer = math.ceil(self.pruning_ratio * num_blocks - 1e-9)
        if fewer >= num_blocks:
            raise InputError(
                f"pruning-ratio = {self.pruning_ratio}: of {count(num_blocks, 'block')} none would stay; lower it"
            )
        return fewer

    def span(self, num_blocks: int) -> int:
        """Return how many adjacent blocks are removed, one more if a layer replaces them."""
        return self.fewer_blocks(num_blocks) + (self.replacement == "layer")

    def asked_of_sites(self, run: "RunSettings") -> Mapping[str, tuple[str, int]]:
        """Return the steps and sequences of a round of training, and the tokens of a step."""
        if self.replacement == "none":
            return {}
        tokens = self.batch_size * run.data.sequence_length
        return {
            "max_batch_tokens": ("llm-streamline.batch-size x data.sequence-length", tokens),
            "max_steps": ("llm-streamline.steps", self.steps),
        }

    def num_rounds(self, federation: FederationSettings) -> int:
        """Return the number of rounds: one that compares blocks, and those that train the layer."""
        return 1 + federation.rounds * (self.replacement == "layer")

    def contradictions(
        self, method: str, federation: FederationSettings, lora: object, num_clients: int
    ) -> list[str]:
        """Return an error line if ``federation.rounds`` is set although no layer is trained."""
        if self.replacement == "none" and federation.rounds != self.ROUNDS:
            return [
                f"federation.rounds = {federation.rounds}: with {method}.replacement = 'none'"
                " nothing is trained, and blocks are compared in one round; leave"
                " federation.rounds out"
            ]
        return []
