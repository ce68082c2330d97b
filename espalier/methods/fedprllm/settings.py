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
            "`one-shot`: all blocks in one round; `iterative`: one block per round, after which"
            " clients continue from the pruned block."
        ),
    )
    local_metric: Literal["wanda", "magnitude", "ria", "sparsegpt"] = Field(
        "wanda",
        description=(
            "Score by which a client ranks its weights: Wanda, RIA, SparseGPT's score without its"
            " weight update, or the magnitude, which does not depend on the data."
        ),
    )
    local_comparison_group: Group = Field(
        "row", description="Group in which weights compete in a client's mask."
    )
    comparison_group: Group = Field(
        "layer", description="Group in which weights compete for the summed votes."
    )
    ties: Literal["magnitude", "index", "random"] = Field(
        "magnitude",
        description=(
            "Order in which weights with equally many votes are pruned: smaller magnitude first,"
            " lower index first, or a seeded random order."
        ),
    )
    weight_scaling: bool = Field(
        False, description="Shrink each kept weight by the fraction of clients that would prune it."
    )
    continue_behind: Literal["masked", "scaled"] = Field(
        "masked",
        description=(
            "Block from which clients of iterative pruning continue: the masked one, as in step 7"
            " of the paper, or with weight scaling the scaled one, as in its published code (the"
            " server then sends one more byte per weight)."
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
    def has_local_baseline(self) -> bool:
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
