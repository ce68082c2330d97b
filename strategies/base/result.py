"""Interface of a run's result, which is the same for the engine and for every method."""

from collections.abc import Collection
from typing import Any, Protocol


class RunResult(Protocol):
    """Result of the rounds so far.

    Large data are stored as blobs of the checkpoint; the result names them by their hash.
    """

    def state(self) -> dict[str, Any]:
        """Return the state for the checkpoint; it holds JSON values only."""

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the state that ``state`` returned."""

    def stored(self) -> Collection[str]:
        """Return the hashes of all blobs that ``state`` names."""

    def report(self) -> dict[str, Any]:
        """Return the method's own entries of ``summary.json``."""
