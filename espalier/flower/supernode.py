"""``flower-supernode`` with shorter polling intervals while its site takes part in a run.

Flower's SuperNode asks the SuperLink for a message and sleeps three seconds if there is none, which
is half of a short round. It checks for its reply twice a second. Both intervals are constants in
its code. Here they are shorter for a while after each message. At idle nodes they are Flower's own,
so that these do not burden the SuperLink.

    python -m espalier.flower.supernode OPTIONS        options of flower-supernode
"""

import sys
import time
from collections.abc import Callable
from typing import Any

from espalier.flower.pulls import ask_again_soon

ASK_SECONDS = 0.2
"""Seconds between two requests for a message at a busy node."""
REPLY_SECONDS = 0.05
"""Seconds between two checks for a reply, which is on this machine."""
BUSY_SECONDS = 120.0
"""Seconds after the last message for which a node counts as busy."""
LONG = 1.0
"""Limit between Flower's waits: shorter ones are for a reply, longer ones for a message."""


class Waits:
    """Replacement of the module ``time`` in Flower's loop; only ``sleep`` differs.

    Parameters
    ----------
    now : clock in seconds
    sleep : function that waits for some seconds
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
        """Wait, but at a busy node no longer than its interval."""
        if seconds < LONG:
            # A message is being processed.
            self._busy_until = self._now() + BUSY_SECONDS
            self._sleep(min(seconds, REPLY_SECONDS))
        else:
            self._sleep(min(seconds, ASK_SECONDS) if self._now() < self._busy_until else seconds)


def main() -> None:
    """Run Flower's program with these waits."""
    from flwr.supernode import start_client_internal
    from flwr.supernode.cli import flower_supernode

    # The module looks ``time`` up in its own namespace, so only Flower's loop is affected.
    vars(start_client_internal)["time"] = Waits()
    ask_again_soon()
    # Flower's messages name the program by this argument.
    sys.argv[0] = "flower-supernode"
    flower_supernode()


if __name__ == "__main__":
    main()
