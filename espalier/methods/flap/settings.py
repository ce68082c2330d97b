"""Settings of FLAP: structured pruning by the fluctuation of channels, on pooled statistics."""

from typing import Literal

from pydantic import Field

from espalier.settings.structured import StructuredSettings


class FlapSettings(StructuredSettings):
    """Table ``[flap]`` (An et al. 2024, section 3)."""

    metric: Literal["wifv", "ifv", "wifn"] = Field(
        "wifv",
        description=(
            "Score of a channel: the variance of its input times the squared norm of its weight"
            " column, the variance of its input, or the mean magnitude of its weight column times"
            " the norm of its input."
        ),
    )
    square_attention: bool = Field(
        True,
        description=(
            "Square the scores of attention before they are standardised, as in the published code."
        ),
    )
    max_client_ratio: float = Field(
        2.0,
        ge=1,
        description=(
            "Maximum number of tokens of a client, and maximum size of its inputs, as a multiple"
            " of the median client's. Each of its variances is limited, above and below, to twice"
            " that ratio of the median client's. 1000000: no limit."
        ),
    )
    bias_compensation: bool = Field(
        True,
        description=(
            "Add the mean of what was removed as a bias, also in families that have no bias there"
            " (section 3.4)."
        ),
    )
