"""Settings of LLM-Pruner: structured pruning by what the loss would change without a unit; and of Mask Tuning's search."""

from typing import Literal

from pydantic import Field

from espalier.settings.structured import StructuredSettings


class LlmPrunerSettings(StructuredSettings):
    """Table ``[llm-pruner]`` (Ma et al. 2023, section 3.2)."""

    selection: Literal["global", "block", "kind", "search"] = Field(  # type: ignore[assignment]
        "kind",
        description="Units that compete: all of the model, those of a block, or groups and channels of each block apart. "
        "`search`: groups of the whole model, and channels likewise, in those numbers that cost the least score together (Mask "
        "Tuning).",
    )
    element: Literal["absolute", "signed", "squared"] = Field(
        "absolute",
        description="How weight times gradient is summed over a unit: magnitudes, as the published code does; with their "
        "signs, so that clients' sums are exactly those of pooled data; or `squared`, the square of each window's signed sum, "
        "which is the diagonal of the Fisher information of a mask (Mask Tuning).",
    )
    spare_first: int = Field(1, ge=0, description="Blocks at the beginning that stay whole; the paper spares 4 of 32.")
    spare_last: int = Field(1, ge=0, description="Blocks at the end that stay whole; the paper spares 2 of 32.")
    max_score_ratio: float = Field(
        10.0, ge=1, description="A client's scores count at most so many times as much as the median client's."
    )
