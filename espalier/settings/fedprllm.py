"""Settings of FedPrLLM: federated mask voting, one-shot."""

from typing import Literal

from pydantic import Field

from espalier.settings.table import Table


class FedPrLLMSettings(Table):
    """Table ``[fedprllm]`` (papers' terms: FedPrLLM section 3.2)."""

    sparsity: float = Field(0.5, gt=0, lt=1, description="share of each comparison group that is pruned")
    local_metric: Literal["wanda", "magnitude"] = Field("wanda", description="score by which a client ranks weights")
    local_comparison_group: Literal["layer", "row"] = Field("row", description="weights that compete in a client's mask")
    comparison_group: Literal["layer", "row"] = Field("layer", description="weights that compete for the summed votes")
    ties: Literal["magnitude", "index"] = Field("magnitude", description="which of equally voted weights goes first")
