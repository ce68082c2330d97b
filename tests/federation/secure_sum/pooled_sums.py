"""Secure sums of pooled pruning, and their requests."""

from collections.abc import Callable
from typing import Any

Change = Callable[[dict[str, Any]], None]
METHOD = "pooled-pruning"
SETTINGS: dict[str, Any] = {"pruning.sparsity": 0.5}
