"""Settings of LLM-Pruner, which removes groups by their effect on the loss, and of Mask Tuning."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from espalier.settings.structured import StructuredSettings
from espalier.settings.table import ReadWith

if TYPE_CHECKING:
    from espalier.settings.federation import FederationSettings

Refined = Literal["off", "groups", "all"]
"""Kinds of prunable groups that a refinement includes."""
KINDS_OF: dict[Refined, tuple[str, ...]] = {
    "off": (),
    "groups": ("groups",),
    "all": ("groups", "channels"),
}


class LlmPrunerSettings(StructuredSettings):
    """Table ``[llm-pruner]`` (Ma et al. 2023, section 3.2)."""

    MAKES_ALONE_WITH: ClassVar[Mapping[str, str | int | tuple[str, ...]]] = {
        "rescale": ("all", "groups")
    }
    ROUNDS_THAT_DIFFER: ClassVar[tuple[int, ...]] = (1, 2)
    READ_WITH: ClassVar[ReadWith] = {
        "rearrange": {"element": ("squared",)},
        "rescale-damping": {"rescale": ("groups", "all")},
    }

    selection: Literal["global", "block", "kind", "search"] = Field(  # type: ignore[assignment]
        "kind",
        description=(
            "Units that compete: all of the model, those of a block, or groups and channels of each"
            " block apart. `search`: groups of the whole model, and channels likewise, in those"
            " numbers that cost the least score together (Mask Tuning)."
        ),
    )
    element: Literal["absolute", "signed", "squared"] = Field(
        "absolute",
        description=(
            "How weight times gradient is summed over a unit: magnitudes, as the published code"
            " does; with their signs, so that clients' sums are exactly those of pooled data; or"
            " `squared`, the square of each window's signed sum, which is the diagonal of the"
            " Fisher information of a mask (Mask Tuning)."
        ),
    )
    spare_first: int = Field(
        1, ge=0, description="Blocks at the beginning that stay whole; the paper spares 4 of 32."
    )
    spare_last: int = Field(
        1, ge=0, description="Blocks at the end that stay whole; the paper spares 2 of 32."
    )
    max_score_ratio: float = Field(
        2.0,
        ge=1,
        description=(
            "A client's scores, and its normal equations where units are rescaled, count at most so"
            " many times as much as the median client's. Each number stays within twice that ratio"
            " of the median client's, above and below. 1000000: as they are."
        ),
    )
    rearrange: Refined = Field(
        "off",
        description=(
            "Mask Tuning's second stage: as many groups (or also channels, `all`) go of each block,"
            " but others where the loss then rises less, by the Fisher information of each two"
            " masks. A client sends up to `data.windows` numbers more for each unit."
        ),
    )
    rescale: Refined = Field(
        "off",
        description=(
            "Mask Tuning's third stage, a round more: groups (or also channels, `all`) that stay"
            " are scaled so that a block's part gives what it gave with all. A client sends half"
            " the square of the units that stay, per block."
        ),
    )
    rescale_damping: float = Field(
        0.01,
        gt=0,
        le=100,
        description=(
            "How strongly scales are drawn to 1, in parts of the mean square of what a unit gives."
        ),
    )

    @property
    def rearranged(self) -> tuple[str, ...]:
        """Kinds of prunable groups that are rearranged."""
        return KINDS_OF[self.rearrange]

    @property
    def rescaled(self) -> tuple[str, ...]:
        """Kinds of prunable groups that are rescaled."""
        return KINDS_OF[self.rescale]

    @property
    def makes_alone(self) -> bool:
        """True if groups are rescaled.

        The round that rescales uses the groups chosen from all clients' scores, so a local baseline
        needs a message of its own.
        """
        return bool(self.rescaled)

    def num_rounds(self, federation: "FederationSettings") -> int:
        """Return the number of rounds: one that computes scores, and one that rescales."""
        return 1 + bool(self.rescaled)
