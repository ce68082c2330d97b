"""What the rounds of a run lead to, as the engine and the server's results see it, whatever the method."""

from collections.abc import Collection
from typing import Any, Protocol


class RunResult(Protocol):
    """A result keeps its large data in the checkpoint's blobs, and names them by hash."""

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds, JSON values only."""

    def restore(self, state: dict[str, Any]) -> None:
        """Take over what ``state`` returned."""

    def stored(self) -> Collection[str]:
        """Hashes of all blobs that ``state`` names."""

    def report(self) -> dict[str, Any]:
        """What the summary says of this method alone."""
