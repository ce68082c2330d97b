"""What every method says that cuts whole units out of a model: attention groups, feed-forward channels."""

from typing import Literal

from pydantic import Field

from espalier.settings.method import MethodSettings


class StructuredSettings(MethodSettings):
    """How much is cut, which units compete, and in which form the smaller model is written."""

    share: float = Field(
        0.2,
        gt=0,
        lt=1,
        description="Share of the parameters that is cut, at least, and less than one unit beyond it. A unit is a key-value "
        "group of attention (a head, where each has its own keys and values) or a feed-forward channel.",
    )
    share_of: Literal["blocks", "model"] = Field(
        "blocks",
        description="What `share` is a share of: what can be cut in the blocks, or the whole model with its embeddings.",
    )
    selection: Literal["global", "block", "kind"] = Field(
        "global",
        description="Units that compete: all of the model, those of a block, or groups and channels of each block by "
        "themselves, so that all blocks stay alike.",
    )
    form: Literal["auto", "compact", "plain", "zero-filled"] = Field(
        "auto",
        description="How the smaller model is written: `compact` with `structure.json` and code for `trust_remote_code=True`; "
        "`plain` for transformers alone, if all blocks are alike; `zero-filled` for transformers alone, as large as before; "
        "`auto`: plain if possible, else compact.",
    )
