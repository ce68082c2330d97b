"""Settings of the local training loop, which all tuning methods share."""

from typing import Literal

from pydantic import Field, field_validator, model_validator

from espalier.settings.table import Table

LEAST_GRADIENT_NORM = 1e-3
"""AdamW divides by a gradient's own size, but for 1e-8 that it adds: a gradient far below that would be sent as it is."""

MOST_LEARNING_RATE = 0.1
"""AdamW moves a number by about the learning rate in a step, whatever the gradient; beyond this the first step ruins any
adapter, and nothing is learnt from the sequences of the others."""
MOST_DECAYED = 1.0
"""Learning rate times weight decay, times the steps of a round: what the first of them led to keeps a third of its weight."""
MOST_PULL = 1.0
"""Of FedProx, and of other terms in the loss that know nothing of the data: beside a larger one the text counts no more."""


class TrainingSettings(Table):
    """Table ``[training]``."""

    base: Literal["float32", "bfloat16", "nf4"] = Field(
        "float32",
        description=(
            "What the frozen base model is held in. `nf4` quantises the blocks' linears to 4 bits"
            " (needs the extra `nf4`), once per node; they are then read from"
            " `<state-dir>/quantised`."
        ),
    )
    double_quantisation: bool = Field(
        True, description="The constants of the NF4 quantisation are quantised too."
    )
    steps: int = Field(10, ge=1, description="Optimiser steps of a client in a round.")
    batch_size: int = Field(4, ge=1, description="Sequences of a forward pass.")
    accumulation: int = Field(1, ge=1, description="Forward passes of an optimiser step.")
    learning_rate: float = Field(
        1e-3, gt=0, le=MOST_LEARNING_RATE, description="Learning rate of AdamW, at its highest."
    )
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="How the learning rate falls over all rounds together."
    )
    warmup_steps: int = Field(
        0, ge=0, description="Steps over which the learning rate rises at the start of the run."
    )
    weight_decay: float = Field(
        0.0,
        ge=0,
        description=(
            "Weight decay of AdamW; times learning rate and steps of a round it is at most 1."
        ),
    )
    beta1: float = Field(0.9, ge=0, lt=1, description="First beta of AdamW.")
    beta2: float = Field(0.999, ge=0, lt=1, description="Second beta of AdamW.")
    max_gradient_norm: float = Field(
        1.0, ge=0, description="Gradients are clipped to this norm, 0.001 or more; 0 leaves them."
    )
    proximal: float = Field(
        0.0,
        ge=0,
        le=MOST_PULL,
        description="FedProx: strength of the pull towards the round's global adapters.",
    )
    gradient_checkpointing: bool = Field(
        False, description="Compute activations again in the backward pass: less memory, more time."
    )

    @field_validator("max_gradient_norm")
    @classmethod
    def _leaves_a_gradient(cls, value: float) -> float:
        if 0 < value < LEAST_GRADIENT_NORM:
            raise ValueError(
                f"is below {LEAST_GRADIENT_NORM}, so that AdamW would send gradients as they are;"
                " raise it, or take 0"
            )
        return value

    @model_validator(mode="after")
    def _no_step_is_forgotten(self) -> "TrainingSettings":
        decayed = self.learning_rate * self.weight_decay * self.steps
        if decayed > MOST_DECAYED:
            raise ValueError(
                f"weight-decay = {self.weight_decay}: learning-rate x weight-decay x steps ="
                f" {decayed:g} is above {MOST_DECAYED:g}, so that a round's first steps are"
                " forgotten; lower one of them"
            )
        return self
