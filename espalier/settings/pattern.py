"""Setting that holds an n:m sparsity pattern."""

import re
from typing import Annotated

from pydantic import AfterValidator


def _keeps_n_of_m(pattern: str) -> str:
    match = re.fullmatch(r"([1-9][0-9]*):([1-9][0-9]*)", pattern)
    if pattern and (match is None or int(match[1]) >= int(match[2])):
        raise ValueError("is no n:m pattern that keeps n of m weights, for instance 2:4")
    return pattern


Pattern = Annotated[str, AfterValidator(_keeps_n_of_m)]
"""Pattern ``n:m``, which keeps n of every m weights; empty for no pattern."""
