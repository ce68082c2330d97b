"""Settings that methods share which produce a smaller model: output format and pruning ratio."""

from typing import Literal

from pydantic import Field

from espalier.settings.method import MethodSettings
from espalier.settings.table import Table


class SmallerSettings(MethodSettings):
    """Settings of the format in which a smaller model is written."""

    form: Literal["auto", "compact", "plain", "zero-filled"] = Field(
        "auto",
        description=(
            "How the smaller model is written: `compact` with `structure.json` and code for"
            " `trust_remote_code=True`; `plain` for transformers alone, if all blocks are alike;"
            " `zero-filled` for transformers alone, as large as before; `auto`: plain if possible,"
            " else compact."
        ),
    )


class CutSettings(Table):
    """Settings of the pruning ratio and of the prunable groups that compete."""

    share: float = Field(
        0.2,
        gt=0,
        lt=1,
        description=(
            "Share of the parameters that is cut, at least, and less than one unit beyond it; with"
            " `selection` of `block` or `kind` less than one in each block, or of each kind in each"
            " block. A unit is a key-value group of attention (a head, where each has its own keys"
            " and values) or a feed-forward channel."
        ),
    )
    share_of: Literal["blocks", "model"] = Field(
        "blocks",
        description=(
            "What `share` is a share of: what can be cut in the blocks, or the whole model with its"
            " embeddings."
        ),
    )
    channel_multiple: int = Field(
        1,
        ge=1,
        description=(
            "Channels that stay in a block are a multiple of it, so a few more go. With 64 the"
            " smaller model can be held in NF4, for instance to be tuned with `training.base=nf4`."
        ),
    )
    selection: Literal["global", "block", "kind"] = Field(
        "global",
        description=(
            "Units that compete: all of the model, those of a block, or groups and channels of each"
            " block by themselves, so that all blocks stay alike."
        ),
    )


class StructuredSettings(CutSettings, SmallerSettings):
    """Settings of structured pruning: pruning ratio and format of the smaller model."""
