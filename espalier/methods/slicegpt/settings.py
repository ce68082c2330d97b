"""Settings of SliceGPT: principal components of the residual stream, without the minor ones."""

import math
from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field

from espalier.errors import InputError
from espalier.settings.method import PublicTextSettings
from espalier.settings.table import ReadWith


class SliceGptSettings(PublicTextSettings):
    """Table ``[slicegpt]`` (Ashkboos et al. 2024, section 3)."""

    FEDERATION: ClassVar[tuple[str, ...]] = (
        "client-weights",
        "max-weight-ratio",
        "max-update-ratio",
    )
    WEIGHTS: ClassVar[tuple[str, ...]] = ("samples", "equal")
    MAKES_ALONE_WITH: ClassVar[Mapping[str, str | int | tuple[str, ...]]] = {
        "covariances": "public"
    }
    READ_WITH: ClassVar[ReadWith] = {
        key: {"covariances": ("public",)} for key in ("public-text", "public-samples")
    }

    width_pruning_ratio: float = Field(
        0.2,
        ge=0,
        lt=1,
        description=(
            "Fraction of the residual stream's width that is removed. The number of parameters"
            " decreases by less, because each block gets two matrices that map one basis to the"
            " next: in a model with the shape of LLaMA-2-7B by 10% with 0.2, 16% with 0.25 and 22%"
            " with 0.3. A model whose head shares the embedding's weights gets a head of its own. 0"
            " rotates and removes nothing."
        ),
    )
    multiple: int = Field(
        8,
        ge=1,
        description=(
            "The width that stays is a multiple of this number, so slightly more is removed. With"
            " 64 the sliced model can be loaded in NF4, for instance to tune it with"
            " `training.base=nf4`."
        ),
    )
    covariances: Literal["clients", "public"] = Field(
        "clients",
        description=(
            "Signals that determine the minor components: the clients', pooled, or those of a"
            " public text (`public-text`) at the server, for which clients send nothing."
        ),
    )

    @property
    def has_local_baseline(self) -> bool:
        """True if moments come from public text: the round then leaves no local baseline."""
        return self.covariances == "public"

    def width(self, dense: int) -> int:
        """Return the width of the residual stream after slicing.

        Raises
        ------
        InputError
            No dimension would be left.
        """
        # The small constant absorbs rounding errors of the product.
        kept = math.floor((1 - self.width_pruning_ratio) * dense + 1e-9)
        kept -= kept % self.multiple
        if kept < 1:
            raise InputError(
                f"width-pruning-ratio = {self.width_pruning_ratio}: of a residual stream of width"
                f" {dense} no multiple of {self.multiple} would stay; lower width-pruning-ratio or"
                " multiple"
            )
        return kept
