"""``flower-supernode`` that looks for messages more often while its site takes part in a run.

Flower's SuperNode asks the SuperLink for a message, and sleeps for three seconds if there is none; that is half of the time
of a short round. It looks for its reply twice a second. Both intervals are written into its code. Here they are shorter as
long as a message came a short while ago, and Flower's own otherwise, so that idle nodes do not burden the SuperLink.

    python -m espalier.flower.supernode OPTIONS        options of flower-supernode
"""

import sys
import time
from collections.abc import Callable
from typing import Any

ASK_SECONDS = 0.2
"""Interval between two questions for a message, at a busy node."""
REPLY_SECONDS = 0.05
"""Interval between two looks for a reply, which is on this machine."""
BUSY_SECONDS = 120.0
"""A node counts as busy for so long behind its last message."""
LONG = 1.0
"""Flower's waits for a reply, and for parts of one, are shorter; the one for a message is longer."""


class Waits:
    """Stands in for the module ``time`` in Flower's loop; everything but ``sleep`` is that module's.

    Parameters
    ----------
    now, sleep : a clock
    """

    def __init__(
        self, now: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._now = now
        self._sleep = sleep
        self._busy_until = now()

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def sleep(self, seconds: float) -> None:
        """Wait, but no longer than a busy node waits."""
        if seconds < LONG:  # a message is at work
            self._busy_until = self._now() + BUSY_SECONDS
            self._sleep(min(seconds, REPLY_SECONDS))
        else:
            self._sleep(min(seconds, ASK_SECONDS) if self._now() < self._busy_until else seconds)


def main() -> None:
    """Run Flower's program with these waits."""
    from flwr.supernode import start_client_internal
    from flwr.supernode.cli import flower_supernode

    vars(start_client_internal)["time"] = Waits()
    sys.argv[0] = "flower-supernode"  # as its messages name it
    flower_supernode()


if __name__ == "__main__":
    main()
