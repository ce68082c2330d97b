"""Settings of the local training loop that all tuning methods share."""

from typing import Literal

from pydantic import Field, model_validator

from espalier.settings.table import Table

BETAS = (0.9, 0.999)
"""Betas of AdamW."""

MAX_LEARNING_RATE = 0.1
"""Maximum learning rate.

An AdamW step changes a parameter by about the learning rate, independent of the gradient. Above
this value the first step destroys any adapter, and the other sequences of the round have no effect.
"""
MAX_DECAYED = 1.0
"""Maximum of learning rate times weight decay times steps of a round.

At this value the effect of the first step is decayed to a third (1/e).
"""
MAX_PULL = 1.0
"""Maximum weight of FedProx and of other loss terms that do not depend on the data.

With a larger weight the loss on the text would hardly matter.
"""


class TrainingSettings(Table):
    """Table ``[training]``."""

    base: Literal["float32", "bfloat16", "nf4"] = Field(
        "float32",
        description=(
            "Number format of the frozen base model. `nf4` quantises the blocks' linear layers to"
            " 4 bits with double quantisation (needs the extra `nf4`), once per node; later they"
            " are read from `<state-dir>/quantised`."
        ),
    )
    steps: int = Field(10, ge=1, description="Number of optimiser steps of a client in a round.")
    batch_size: int = Field(4, ge=1, description="Number of sequences in a forward pass.")
    accumulation: int = Field(1, ge=1, description="Number of forward passes in an optimiser step.")
    learning_rate: float = Field(
        1e-3, gt=0, le=MAX_LEARNING_RATE, description="Maximum learning rate of AdamW."
    )
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="Schedule of the learning rate over all rounds together."
    )
    weight_decay: float = Field(
        0.0,
        ge=0,
        description=(
            "Weight decay of AdamW; its product with the learning rate and the steps of a round is"
            " at most 1."
        ),
    )
    proximal: float = Field(
        0.0,
        ge=0,
        le=MAX_PULL,
        description="FedProx: strength of the pull towards the round's global adapters.",
    )
    gradient_checkpointing: bool = Field(
        False,
        description=(
            "Recompute activations in the backward pass, which takes less memory and more time."
        ),
    )

    compile: bool = Field(
        False,
        description=(
            "Compile the model's forward and backward pass with `torch.compile`, which needs a C++"
            " compiler on a CPU. docs/findings/performance.md says what it gained."
        ),
    )

    @model_validator(mode="after")
    def _no_step_is_forgotten(self) -> "TrainingSettings":
        decayed = self.learning_rate * self.weight_decay * self.steps
        if decayed > MAX_DECAYED:
            raise ValueError(
                f"weight-decay = {self.weight_decay}: learning-rate x weight-decay x steps ="
                f" {decayed:g} is above {MAX_DECAYED:g}, so that a round's first steps are"
                " forgotten; lower one of them"
            )
        return self
