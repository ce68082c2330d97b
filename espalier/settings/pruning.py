"""Settings shared by methods that prune: single weights, or groups for a smaller model."""

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, field_validator

from espalier.settings.method import MethodSettings
from espalier.settings.table import Table

if TYPE_CHECKING:
    from espalier.settings.tables.federation import FederationSettings


def _keeps_n_of_m(pattern: str) -> str:
    match = re.fullmatch(r"([1-9][0-9]*):([1-9][0-9]*)", pattern)
    if pattern and (match is None or int(match[1]) >= int(match[2])):
        raise ValueError("is not an n:m pattern that keeps n of m weights, for instance 2:4")
    return pattern


MASKS_HAVE_NO_NOISE = (
    "one record can change any number of the bits of a mask, and flipping bits at random until it"
    " is hidden leaves nothing of the mask"
)
"""Reason for which methods that send masks refuse private runs."""

Pattern = Annotated[str, AfterValidator(_keeps_n_of_m)]
"""Pattern ``n:m``, which keeps n of every m weights; empty for no pattern."""


AUTO = "auto"
Group = Literal["layer", "row", "column"]
Selection = Literal["auto", "global", "block", "kind", "search"]


class PruningSettings(MethodSettings):
    """Settings of the sparsity and of the weights that compete."""

    sparsity: float = Field(
        0.5,
        gt=0,
        lt=1,
        description=(
            "Fraction of each comparison group (with fedspallm of each matrix, in the end) that is"
            " pruned, exactly `int(size * sparsity)` weights."
        ),
    )
    pattern: Pattern = Field(
        "",
        description=(
            "n:m pattern in place of sparsity and comparison groups; `2:4` keeps 2 of every 4"
            " weights of a row."
        ),
    )

    @property
    def local_group(self) -> str:
        """Group in which a client prunes an exact fraction: the pattern or a comparison group."""
        return self.pattern or "layer"

    @property
    def server_group(self) -> str:
        """Group in which weights compete at the server: the pattern or a comparison group."""
        return self.pattern or "layer"

    @property
    def columns_together(self) -> int:
        """Number of columns that a client prunes at a time; 0 if rows are pruned whole.

        A pattern must not cross the boundary between two such sets of columns.
        """
        return 0


class MaskingSettings(PruningSettings):
    """Settings of methods whose server decides masks, in one round or block by block."""

    MAKES_LOCAL_BASELINE_WITH: ClassVar[Mapping[str, str | tuple[str, ...]]] = {
        "pruning.strategy": "iterative"
    }

    strategy: Literal["one-shot", "iterative"] = Field(
        "one-shot",
        description=(
            "`one-shot`: all blocks in one round; `iterative`: one block per round, after which"
            " clients continue from the pruned block."
        ),
    )
    metric: Literal["wanda", "magnitude", "ria", "sparsegpt"] = Field(
        "wanda",
        description=(
            "Score by which weights are ranked, at each client with fedprllm and at the server with"
            " pooled-pruning: Wanda or RIA; with fedprllm also SparseGPT's score without its weight"
            " update, or the magnitude, which does not depend on the data."
        ),
    )
    comparison_group: Group = Field(
        "row",
        description=(
            "Group in which weights compete by their score, with fedprllm in a client's mask."
        ),
    )

    @property
    def local_group(self) -> str:
        """Group in which weights compete by their score: the pattern or ``comparison-group``."""
        return self.pattern or self.comparison_group

    @property
    def server_group(self) -> str:
        """Group in which weights compete at the server: the same, unless votes are counted."""
        return self.local_group

    @property
    def has_local_baseline(self) -> bool:
        """True for iterative pruning, in which a client's replies depend on the others' decisions.

        The local baseline prunes without them, in a message of its own.
        """
        return self.strategy == "iterative"

    def last_rounds(
        self, federation: "FederationSettings", num_blocks: Callable[[], int], num_clients: int
    ) -> range:
        """Return the rounds after which the run ends: one round, or one per block."""
        last = 1 if self.strategy == "one-shot" else num_blocks()
        return range(last, last + 1)


class SmallerSettings(MethodSettings):
    """Settings of the format in which a smaller model is written."""

    form: Literal["auto", "compact", "plain", "zero-filled"] = Field(
        "auto",
        description=(
            "Format of the smaller model. `compact`: with `structure.json` and code for"
            " `trust_remote_code=True`. `plain`: for transformers without such code, if all blocks"
            " have the same shape. `zero-filled`: for transformers without such code, as large as"
            " before. `auto`: plain if possible, otherwise compact."
        ),
    )


def ratio_field(
    *,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
) -> Any:
    """Return the field of the pruning ratio, ``pruning.ratio``, with a method's bounds."""
    return Field(
        0.2,
        alias="ratio",
        description=(
            "Pruning ratio: the fraction that is removed at least. flap, llm-pruner: of the"
            " parameters of the blocks' prunable groups; it is exceeded by less than one group,"
            " with `selection` of `block` or `kind` by less than one in each block, or of each kind"
            " in each block. fedspine: of every device's parameters (p*), likewise; 0: only ranks"
            " are chosen (the paper without A_P). llm-streamline: of the blocks, rounded up. sft-p:"
            " of what `sft-p.ratio-of` names, at every client whose own configuration"
            " (`pruning-ratio`) names no ratio, at most 0.95. A prunable group is a key-value group"
            " of attention (a head, if each has its own keys and values) or a feed-forward channel."
        ),
        ge=ge,
        gt=gt,
        le=le,
        lt=lt,
    )


class CutSettings(Table):
    """Settings of the pruning ratio and of the prunable groups that compete."""

    SELECTIONS: ClassVar[tuple[Selection, ...]] = ("global", "block", "kind")
    """Allowed values of ``pruning.selection``; ``auto`` stands for the first."""

    pruning_ratio: float = ratio_field(gt=0, lt=1)
    channel_multiple: int = Field(
        1,
        ge=1,
        description=(
            "The number of channels that stay in a block is a multiple of this number, so slightly"
            " more are removed. With 64 the smaller model can be loaded in NF4, for instance to"
            " tune it with `training.base=nf4`."
        ),
    )
    selection: Selection = Field(
        AUTO,
        validate_default=True,
        description=(
            "Prunable groups that compete. `global`: those of the whole model. `block`: those of a"
            " block. `kind`: attention groups and channels of each block separately, so that all"
            " blocks keep the same shape, as in llm-pruner's published code and fedspine's paper."
            " `search` (Mask Tuning, only llm-pruner): attention groups of the whole model, and"
            " channels likewise, in the numbers with the lowest total score. `auto`: `block` with"
            " llm-pruner, otherwise `global`."
        ),
    )

    @field_validator("selection")
    @classmethod
    def _method_has_selection(cls, value: str) -> str:
        if value == AUTO:
            return cls.SELECTIONS[0]
        if value not in cls.SELECTIONS:
            known = " or ".join(map(repr, (AUTO, *cls.SELECTIONS)))
            raise ValueError(f"this method does not have it; set it to {known}")
        return value


class StructuredSettings(CutSettings, SmallerSettings):
    """Settings of structured pruning: pruning ratio and format of the smaller model."""

    FEDERATION: ClassVar[tuple[str, ...]] = (
        "max-weight-ratio", "aggregation-rule", "max-update-ratio", "secure-sum",
    )  # fmt: skip
    RULES: ClassVar[tuple[str, ...]] = ("clipped-mean", "mean")
    WEIGHTS: ClassVar[tuple[str, ...]] = ("samples",)
    """Clients count by their tokens; this cannot be chosen."""


class PersonalModelSettings(MethodSettings):
    """Settings that control whether each client's model is written."""

    keep_models: bool = Field(
        True,
        description=(
            "Each client writes its smaller model after the rounds: in a simulation to `clients/`"
            " in the run directory, at a real site to its `models-dir`, if its owner names one."
        ),
    )
