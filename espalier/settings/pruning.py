"""Settings shared by methods that prune single weights (unstructured or n:m)."""

from pydantic import Field

from espalier.settings.method import MethodSettings
from espalier.settings.pattern import Pattern


class PruningSettings(MethodSettings):
    """Settings of the sparsity and of the weights that compete."""

    sparsity: float = Field(
        0.5,
        gt=0,
        lt=1,
        description=(
            "Fraction of each comparison group that is pruned, exactly `int(size * sparsity)`"
            " weights."
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
