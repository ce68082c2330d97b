"""Settings of FLAP: structured pruning by the fluctuation of channels, on pooled statistics."""

from typing import Literal

from pydantic import Field

from espalier.settings.structured import StructuredSettings


class FlapSettings(StructuredSettings):
    """Table ``[flap]`` (An et al. 2024, section 3)."""

    metric: Literal["wifv", "ifv", "wifn"] = Field(
        "wifv",
        description=(
            "What a channel is worth: the variance of its input times its column's squared norm,"
            " the variance alone, or its mean magnitude times the input's norm."
        ),
    )
    square_attention: bool = Field(
        True,
        description=(
            "Attention's scores are squared before they are standardised, as in the published code."
        ),
    )
    max_client_ratio: float = Field(
        2.0,
        ge=1,
        description=(
            "A client's tokens and the size of its inputs count at most so many times the median"
            " client's. Each of its variances stays within twice that ratio of the median client's,"
            " above and below. 1000000: as they are."
        ),
    )
    bias_compensation: bool = Field(
        True,
        description=(
            "The mean of what was cut is added as a bias, also where the family has none there"
            " (section 3.4)."
        ),
    )
