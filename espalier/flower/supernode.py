"""``flower-supernode`` with shorter polling intervals while its site takes part in a run.

Flower's SuperNode asks the SuperLink for a message and sleeps three seconds if there is none, which
is half of a short round. It checks for its reply twice a second. Both intervals are constants in
its code. Here they are shorter for a while after each message. At idle nodes they are Flower's own,
so that these do not burden the SuperLink.

    python -m espalier.flower.supernode OPTIONS        options of flower-supernode

Flower ends with a traceback if the SuperLink refuses a node. Here one sentence with a remedy
replaces it. All other lines pass unchanged.
"""

import re
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
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
    """Replacement of the module ``time`` in Flower's loop; only ``sleep`` differs."""

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


CONNECTED = re.compile(r"SuperNode ID: (\d+)")
DETAILS = re.compile(r'^\s*details = "(.*)"\s*$')
ERROR_BEGINS = "<_InactiveRpcError of RPC"
ERROR_ENDS = ">"
TRACEBACK = "Traceback (most recent call last):"
NOT_CONNECTED = "RuntimeError: generator didn't yield"
"""End of a traceback of Flower that only repeats the previous error."""
REFUSALS = {
    "No SuperNode found with the given public key": (
        "does not know this node's key ({key}, {fingerprint}); register it there once: flwr"
        " supernode register {site}.key.pub CONNECTION"
    ),
    "must be registered via the CLI": (
        "accepts only nodes with a registered key, and this node was started without a key; give"
        " --auth-supernode-private-key KEY, and register KEY.pub there: flwr supernode register"
        " KEY.pub CONNECTION"
    ),
    "could not be activated": (
        "still counts a node with this key as connected, for up to a minute after that node was"
        " killed; start this node again after that minute, and give each node its own key"
    ),
}
"""Reasons for which a SuperLink refuses a node, by a part of Flower's error, with remedies."""


@dataclass
class SupernodeLog:
    """Log of one SuperNode."""

    site: str
    """Site name in its configuration; empty if it has none."""
    superlink: str
    """Address of the SuperLink."""
    key: str
    """Path of the private key by which the SuperLink knows the node; empty without a key."""
    fingerprint: str
    """Fingerprint of that key."""
    _reason: str = ""
    _held: list[str] = field(default_factory=list)
    """Buffered lines of an error or traceback that a sentence may replace."""

    def pass_on(self, lines: Iterable[str]) -> None:
        """Print the filtered lines until the input ends."""
        for line in lines:
            for shown in self.heard(line):
                print(shown, file=sys.stderr, flush=True)
        for shown in self.rest():
            print(shown, file=sys.stderr, flush=True)

    def heard(self, line: str) -> list[str]:
        """Return the lines to print after a new line: none while an error is incomplete."""
        line = line.rstrip("\n")
        if self._held:
            return self._heard_more(line)
        if ERROR_BEGINS in line or line == TRACEBACK:
            self._held.append(line)
            return []
        if (found := CONNECTED.search(line)) is None:
            return [line]
        who = f"as {self.site}" if self.site else "as a node without a site name"
        key = f", with the key {self.fingerprint}" if self.fingerprint else ""
        return [
            line,
            f"espalier: connected to {self.superlink} {who} (node {found[1]}{key}); waiting for runs",
        ]

    def _heard_more(self, line: str) -> list[str]:
        """Return the lines to print after a further line of an error or traceback."""
        self._held.append(line)
        if self._held[0] != TRACEBACK:
            if found := DETAILS.match(line):
                self._reason = found[1]
            if line != ERROR_ENDS:
                return []
            held = self.rest()
            return [f"espalier: {self._why_refused()}"] if self._reason else held
        if line.startswith((" ", "\t")) or not line:
            return []
        held = self.rest()
        return [] if self._reason and line == NOT_CONNECTED else held

    def rest(self) -> list[str]:
        """Return and clear the buffered lines."""
        held = self._held
        self._held = []
        return held

    def _why_refused(self) -> str:
        """Return why the SuperLink refused the node, with a remedy."""
        why = next(
            (text for part, text in REFUSALS.items() if part in self._reason),
            "refused this node: {reason}",
        )
        values = {"key": self.key, "fingerprint": self.fingerprint, "site": self.site or "NAME"}
        return f"the SuperLink {self.superlink} {why.format(**values, reason=self._reason)}"


if __name__ == "__main__":
    main()
