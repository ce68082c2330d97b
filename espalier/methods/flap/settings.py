"""Settings of FLAP: structured pruning by the fluctuation of channels, on pooled statistics."""

from pydantic import Field

from espalier.settings.structured import StructuredSettings


class FlapSettings(StructuredSettings):
    """Table ``[flap]`` (An et al. 2024, section 3), with the metric WIFV."""

    square_attention: bool = Field(
        True,
        description=(
            "Square the scores of attention before they are standardised, as in the published code."
        ),
    )
    bias_compensation: bool = Field(
        True,
        description=(
            "Add the mean of what was removed as a bias, also in families that have no bias there"
            " (section 3.4)."
        ),
    )
