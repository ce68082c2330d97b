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
    READ_WITH: ClassVar[ReadWith] = {"rearrange": {"element": ("squared",)}}

    selection: Literal["global", "block", "kind", "search"] = Field(  # type: ignore[assignment]
        "kind",
        description=(
            "Prunable groups that compete: those of the whole model, those of a block, or"
            " attention groups and channels of each block separately. `search`: attention groups of"
            " the whole model, and channels likewise, in the numbers with the lowest total score"
            " (Mask Tuning)."
        ),
    )
    element: Literal["absolute", "signed", "squared"] = Field(
        "absolute",
        description=(
            "Sum of weight times gradient over a prunable group: of magnitudes, as in the"
            " published code; of signed values, so that clients' sums are exactly those of pooled"
            " data; or `squared`, the square of each sample's signed sum, which is the diagonal of"
            " the Fisher information of a mask (Mask Tuning)."
        ),
    )
    spare_first: int = Field(
        1, ge=0, description="Number of first blocks that are not pruned; the paper spares 4 of 32."
    )
    spare_last: int = Field(
        1, ge=0, description="Number of last blocks that are not pruned; the paper spares 2 of 32."
    )
    rearrange: Refined = Field(
        "off",
        description=(
            "Second stage of Mask Tuning: as many attention groups (or also channels, `all`) of"
            " each block are removed as before, but different ones if the loss then increases less,"
            " by the Fisher information of each pair of masks. A client sends up to `data.num-samples`"
            " more numbers for each group."
        ),
    )
    rescale: Refined = Field(
        "off",
        description=(
            "Third stage of Mask Tuning, in one more round: attention groups (or also channels,"
            " `all`) that stay are scaled so that the output of a block's part comes close to that"
            " with all groups. A client sends half the square of the number of groups that stay,"
            " per block."
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
    def has_local_baseline(self) -> bool:
        """True if groups are rescaled.

        The round that rescales uses the groups chosen from all clients' scores, so a local baseline
        needs a message of its own.
        """
        return bool(self.rescaled)

    def num_rounds(self, federation: "FederationSettings") -> int:
        """Return the number of rounds: one that computes scores, and one that rescales."""
        return 1 + bool(self.rescaled)
