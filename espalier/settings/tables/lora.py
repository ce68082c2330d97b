"""Settings of the LoRA adapters that a tuning method trains."""

import re
from typing import Annotated, Any

from pydantic import AfterValidator, Field, field_validator, model_validator

from espalier.settings.table import Table

CANONICAL_LINEARS = (
    "attn.q", "attn.k", "attn.v", "attn.qkv", "attn.o",
    "mlp.gate", "mlp.up", "mlp.gateup", "mlp.down",
)  # fmt: skip
"""Canonical names of a block's linears.

A family without a gate has no ``mlp.gate``. Fused matrices have names of their own.
"""
_LINEAR = r"[a-z]+\.[a-z]+"
MAX_DROPOUT = 0.5
"""Maximum dropout.

With more, a step would depend on few tokens of a sequence, and the seed determines which ones.
"""
SCALINGS = (1e-2, 1e3)
"""Minimum and maximum of ``alpha / rank``.

Below it AdamW's epsilon is not negligible compared with the gradients, so updates would reveal
their magnitudes. Far above it only the first step matters.
"""


MAX_RANK = 65536
"""Maximum rank of a client, above the width of all models."""


def _are_ranks(value: str) -> str:
    if value.strip() and not all(
        re.fullmatch("[1-9][0-9]{0,8}", part.strip()) and int(part) <= MAX_RANK
        for part in value.split(",")
    ):
        raise ValueError(
            f"is not a comma-separated list of ranks from 1 to {MAX_RANK}, for instance 2,4,8"
        )
    return value.strip()


Ranks = Annotated[str, AfterValidator(_are_ranks)]
"""LoRA rank of each client, separated by commas; the last one repeats."""


def ranks_field() -> Any:
    """Return the field of the clients' ranks, ``lora.ranks``."""
    return Field(
        "",
        description=(
            "LoRA rank of each client, for instance `2,4,8`; the last one repeats, and the largest"
            " is `rank`. Empty: with flora `rank` for all, with hetlora in proportion to the nodes'"
            " capability."
        ),
    )


class LoraSettings(Table):
    """Table ``[lora]`` (Hu et al. 2022).

    Matrices have canonical names such as ``attn.q`` and ``mlp.down``.
    """

    rank: int = Field(8, ge=1, description="Rank of the adapters.")
    alpha: float = Field(
        16.0,
        gt=0,
        description=(
            "Numerator of the scale of an update, `alpha / rank * B A`; `alpha / rank` must be"
            " from 0.01 to 1000."
        ),
    )
    ranks: Ranks = ranks_field()
    dropout: float = Field(
        0.0,
        ge=0,
        le=MAX_DROPOUT,
        description="Fraction of an adapter's inputs that is dropped in training.",
    )
    targets: str = Field(
        "attn.q,attn.v",
        description=(
            "Adapted matrices of a block, comma-separated, from `attn.q attn.k attn.v attn.o"
            " mlp.gate mlp.up mlp.down`, or `all`. Where several are the rows of one matrix (Phi:"
            " `attn.qkv`, `mlp.gateup`), each of them names the whole matrix."
        ),
    )
    layers: str = Field(
        "all", description="Adapted blocks: `all`, or numbers and ranges, for instance `0,4-7`."
    )
    merge: bool = Field(
        False,
        description=(
            "Write the base model with the adapters merged into it, in addition to the adapters."
        ),
    )
    keep_zeros: bool = Field(
        False,
        description=(
            "Keep the zero weights of a pruned base at zero, in training and in the merged model."
            " Then only the merged model is written (`merge` must be true), because separate"
            " adapters would fill the zeros."
        ),
    )

    @model_validator(mode="after")
    def _zeros_are_kept_in_a_merged_model(self) -> "LoraSettings":
        if self.keep_zeros and not self.merge:
            raise ValueError(
                "keep-zeros = true: adapters alone would fill the zeros of the base; set it to"
                " false, or merge to true"
            )
        return self

    @field_validator("targets")
    @classmethod
    def _targets_are_names(cls, value: str) -> str:
        if value != "all" and not all(
            re.fullmatch(_LINEAR, part.strip()) for part in value.split(",")
        ):
            raise ValueError(
                "is neither 'all' nor a list of canonical names, for instance attn.q,attn.v; there"
                f" are {', '.join(CANONICAL_LINEARS)}"
            )
        return value

    @field_validator("layers")
    @classmethod
    def _layers_are_ranges(cls, value: str) -> str:
        if value == "all":
            return value
        for part in value.split(","):
            match = re.fullmatch(r"([0-9]{1,4})(?:-([0-9]{1,4}))?", part.strip())
            if match is None:
                raise ValueError(
                    "is neither 'all' nor a list of numbers and ranges, for instance 0,4-7"
                )
            if match[2] and int(match[2]) < int(match[1]):
                raise ValueError(f"the range {part.strip()} ends before it begins")
        return value

    def target_names(self, linears: list[str]) -> list[str]:
        """Return the adapted matrices of a block with these linears.

        Names that the block does not have are included; the model's checks refuse them.
        """
        return (
            linears if self.targets == "all" else [name.strip() for name in self.targets.split(",")]
        )

    def layer_numbers(self, num_blocks: int) -> list[int]:
        """Return the adapted blocks in ascending order.

        Numbers beyond the model's last block are included; the model's checks refuse them.
        """
        if self.layers == "all":
            return list(range(num_blocks))
        found = set()
        for part in self.layers.split(","):
            first, _, last = part.strip().partition("-")
            found |= set(range(int(first), int(last or first) + 1))
        return sorted(found)

    @property
    def scaling(self) -> float:
        """Factor of ``B A``: ``alpha / rank``."""
        return self.alpha / self.rank


def largest_rank_faults(ranks: str, lora: LoraSettings, num_clients: int) -> list[str]:
    """Return an error line if no client has the largest rank, ``lora.rank``.

    The last components of the adapters would stay untrained.
    """
    given = ranks.split(",")
    taken = given[:num_clients]
    largest = max(map(int, taken)) if ranks else lora.rank
    if largest == lora.rank:
        return []
    of_clients = "" if taken == given else f" of the first {num_clients} (num-clients)"
    remedy = f"set lora.rank={largest}, or give a client the rank {lora.rank}"
    if largest > lora.rank:
        remedy = f"give no client more than {lora.rank}, or raise lora.rank"
    return [
        f"lora.ranks = '{ranks}': the largest{of_clients} is {largest}, and lora.rank is"
        f" {lora.rank}; {remedy}"
    ]
