"""Settings shared by methods that prune single weights (unstructured or n:m)."""

import re
from typing import Annotated

from pydantic import AfterValidator, Field

from espalier.settings.method import MethodSettings


def _keeps_n_of_m(pattern: str) -> str:
    match = re.fullmatch(r"([1-9][0-9]*):([1-9][0-9]*)", pattern)
    if pattern and (match is None or int(match[1]) >= int(match[2])):
        raise ValueError("is not an n:m pattern that keeps n of m weights, for instance 2:4")
    return pattern


Pattern = Annotated[str, AfterValidator(_keeps_n_of_m)]
"""Pattern ``n:m``, which keeps n of every m weights; empty for no pattern."""


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
