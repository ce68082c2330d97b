"""Settings of FedPrLLM: clients vote with their pruning masks."""

from collections.abc import Callable, Mapping
from typing import ClassVar, Literal

from pydantic import Field, model_validator

from espalier.settings.federation import FederationSettings
from espalier.settings.pruning import PruningSettings
from espalier.settings.table import ReadWith

Group = Literal["layer", "row", "column"]


class FedPrLLMSettings(PruningSettings):
    """Table ``[fedprllm]``, with the terms of the paper (section 3.2)."""

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
        """True for iterative pruning, in which a client's masks depend on the others' decisions.

        The local baseline prunes without them, in a message of its own.
        """
        return self.strategy == "iterative"

    def last_rounds(
        self, federation: FederationSettings, num_blocks: Callable[[], int], num_clients: int
    ) -> range:
        """Return the rounds after which the run ends: one round, or one per block."""
        last = 1 if self.strategy == "one-shot" else num_blocks()
        return range(last, last + 1)

    @property
    def local_group(self) -> str:
        """Group in which weights compete in a client's mask.

        It is the pattern or ``local-comparison-group``.
        """
        return self.pattern or self.local_comparison_group

    @property
    def server_group(self) -> str:
        """Group in which weights compete for the votes: the pattern or ``comparison-group``."""
        return self.pattern or self.comparison_group
