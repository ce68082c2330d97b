"""Settings of FedPrLLM: federated mask voting."""

from collections.abc import Callable, Mapping
from typing import ClassVar, Literal

from pydantic import Field, model_validator

from espalier.settings.federation import FederationSettings
from espalier.settings.pruning import PruningSettings
from espalier.settings.table import ReadWith

Group = Literal["layer", "row", "column"]


class FedPrLLMSettings(PruningSettings):
    """Table ``[fedprllm]`` (papers' terms: FedPrLLM section 3.2)."""

    READ_WITH: ClassVar[ReadWith] = {
        key: {"pattern": ("",)}
        for key in ("sparsity", "local-comparison-group", "comparison-group")
    }

    MAKES_ALONE_WITH: ClassVar[Mapping[str, str | int | tuple[str, ...]]] = {
        "strategy": "iterative"
    }

    strategy: Literal["one-shot", "iterative"] = Field(
        "one-shot",
        description=(
            "`one-shot`: all blocks in one round; `iterative`: a block per round, and clients go on"
            " behind what was decided."
        ),
    )
    local_metric: Literal["wanda", "magnitude", "ria", "sparsegpt"] = Field(
        "wanda",
        description=(
            "Score by which a client ranks its weights: Wanda, RIA, SparseGPT's score alone, or the"
            " magnitude, which does not look at the data."
        ),
    )
    local_comparison_group: Group = Field(
        "row", description="Weights that compete in a client's mask."
    )
    comparison_group: Group = Field(
        "layer", description="Weights that compete for the summed votes."
    )
    ties: Literal["magnitude", "index", "random"] = Field(
        "magnitude",
        description=(
            "Which of equally voted weights is pruned first: the one of smaller magnitude, the one"
            " of lower index, or a seeded random one."
        ),
    )
    weight_scaling: bool = Field(
        False, description="Shrink the kept weights by the share of clients that would prune them."
    )
    continue_behind: Literal["masked", "scaled"] = Field(
        "masked",
        description=(
            "What clients of iterative pruning go on behind: the masked block, as the paper's step"
            " 7 reads, or with weight scaling the scaled one, as its published code does (a byte"
            " per weight more goes down)."
        ),
    )

    @model_validator(mode="after")
    def _scaled_blocks_are_there(self) -> "FedPrLLMSettings":
        if self.continue_behind == "scaled" and not (
            self.weight_scaling and self.strategy == "iterative"
        ):
            raise ValueError(
                "continue-behind = 'scaled': needs strategy = 'iterative' and weight-scaling = true"
            )
        return self

    @property
    def makes_alone(self) -> bool:
        """In iterative pruning a client's masks stand behind the others' decisions: alone it prunes without them."""
        return self.strategy == "iterative"

    def last_rounds(
        self, federation: FederationSettings, num_blocks: Callable[[], int], num_clients: int
    ) -> range:
        """One round, or one per block."""
        last = 1 if self.strategy == "one-shot" else num_blocks()
        return range(last, last + 1)

    @property
    def local_group(self) -> str:
        """Weights that compete in a client's mask: the pattern, or ``local-comparison-group``."""
        return self.pattern or self.local_comparison_group

    @property
    def server_group(self) -> str:
        """Weights that compete for votes: the pattern, or ``comparison-group``."""
        return self.pattern or self.comparison_group
