"""What every method says that prunes single weights."""

from pydantic import Field

from espalier.settings.method import MethodSettings
from espalier.settings.pattern import Pattern


class PruningSettings(MethodSettings):
    """How much is pruned, and which weights compete."""

    sparsity: float = Field(
        0.5,
        gt=0,
        lt=1,
        description=(
            "Share of each comparison group that is pruned, exactly `int(size * sparsity)` weights."
        ),
    )
    pattern: Pattern = Field(
        "",
        description=(
            "`2:4` keeps 2 of every 4 weights of a row, in place of sparsity and comparison groups;"
            " any n:m."
        ),
    )

    @property
    def local_group(self) -> str:
        """Groups of which a client prunes an exact share: the pattern, a comparison group."""
        return self.pattern or "layer"

    @property
    def server_group(self) -> str:
        """Weights that compete at the server: the pattern, or a comparison group."""
        return self.pattern or "layer"

    @property
    def columns_together(self) -> int:
        """Columns that a client decides at a time, within which a pattern must end; 0: a matrix's rows are pruned whole."""
        return 0
