"""Settings of FedPrLLM: federated mask voting."""

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from espalier.settings.pattern import Pattern
from espalier.settings.table import ReadWith, Table

Group = Literal["layer", "row", "column"]


class FedPrLLMSettings(Table):
    """Table ``[fedprllm]`` (papers' terms: FedPrLLM section 3.2)."""

    strategy: Literal["one-shot", "iterative"] = Field(
        "one-shot", description="all blocks in one round, or a block per round with the decision sent back"
    )
    sparsity: float = Field(0.5, gt=0, lt=1, description="share of each comparison group that is pruned")
    pattern: Pattern = Field("", description="n:m keeps n of every m weights of a row, in place of sparsity and groups")
    local_metric: Literal["wanda", "magnitude", "ria", "sparsegpt"] = Field(
        "wanda", description="score by which a client ranks weights"
    )
    local_comparison_group: Group = Field("row", description="weights that compete in a client's mask")
    comparison_group: Group = Field("layer", description="weights that compete for the summed votes")
    ties: Literal["magnitude", "index", "random"] = Field("magnitude", description="which of equally voted weights goes first")
    weight_scaling: bool = Field(False, description="shrink kept weights by the share of clients that would prune them")
    continue_behind: Literal["masked", "scaled"] = Field(
        "masked", description="iterative: which form of a decided block clients go on behind; scaled needs weight-scaling"
    )

    READ_WITH: ClassVar[ReadWith] = {
        key: {"pattern": ("",)} for key in ("sparsity", "local-comparison-group", "comparison-group")
    }

    @model_validator(mode="after")
    def _scaled_blocks_are_there(self) -> "FedPrLLMSettings":
        if self.continue_behind == "scaled" and not (self.weight_scaling and self.strategy == "iterative"):
            raise ValueError("continue-behind = 'scaled': needs strategy = 'iterative' and weight-scaling = true")
        return self

    @property
    def local_group(self) -> str:
        """Weights that compete in a client's mask: the pattern, or ``local-comparison-group``."""
        return self.pattern or self.local_comparison_group

    @property
    def server_group(self) -> str:
        """Weights that compete for votes: the pattern, or ``comparison-group``."""
        return self.pattern or self.comparison_group
