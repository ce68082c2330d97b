"""Filter for the output of ``flower-supernode`` that explains connections and refusals.

Flower 1.39 ends with a traceback if the SuperLink refuses a node. Here one sentence with a remedy
replaces it. Later releases name an error code, and the sentence follows it. All other lines pass
unchanged.
"""

import re
import sys
from collections.abc import Iterable

CONNECTED = re.compile(r"SuperNode ID: (\d+)")
DETAILS = re.compile(r'^\s*details = "(.*)"\s*$')
ERROR_BEGINS = "<_InactiveRpcError of RPC"
ERROR_ENDS = ">"
TRACEBACK = "Traceback (most recent call last):"
NOT_CONNECTED = "RuntimeError: generator didn't yield"
"""End of a traceback of Flower that only repeats the previous error."""
UNKNOWN_KEY = "No SuperNode found with the given public key"
KEY_WANTED = "must be registered via the CLI"
STILL_CONNECTED = "could not be activated"
CODED = re.compile(r"^\[code: \d+\] (.*)$")
"""Reason of a refusal from Flower 1.40 on."""
NOT_ACTIVATED = "Failed to activate SuperNode"
"""Reason of later releases for both ``UNKNOWN_KEY`` and ``STILL_CONNECTED``."""


class SupernodeLog:
    """Log of one SuperNode.

    Parameters
    ----------
    site : site name in its configuration; empty if it has none
    superlink : address of the SuperLink
    key : path of the private key by which the SuperLink knows the node; empty without a key
    fingerprint : fingerprint of that key
    """

    def __init__(self, site: str, superlink: str, key: str, fingerprint: str) -> None:
        self.site = site
        self.superlink = superlink
        self.key = key
        self.fingerprint = fingerprint
        self._reason = ""
        self._held: list[str] = []
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
        if found := CONNECTED.search(line):
            return [line, self._connected(found[1])]
        if found := CODED.match(line):
            return [line, f"espalier: {why_refused(found[1], self)}"]
        return [line]

    def _heard_more(self, line: str) -> list[str]:
        self._held.append(line)
        if self._held[0] != TRACEBACK:
            if found := DETAILS.match(line):
                self._reason = found[1]
            if line != ERROR_ENDS:
                return []
            return self.rest() if not self._reason else self._error_lines()
        if line.startswith((" ", "\t")) or not line:
            return []
        if self._reason and line == NOT_CONNECTED:
            self._held.clear()
            return []
        return self.rest()

    def rest(self) -> list[str]:
        """Return and clear the buffered lines."""
        held = self._held
        self._held = []
        return held

    def _error_lines(self) -> list[str]:
        self._held.clear()
        return [f"espalier: {why_refused(self._reason, self)}"]

    def _connected(self, node_id: str) -> str:
        who = f"as {self.site}" if self.site else "as a node without a site name"
        key = f", with the key {self.fingerprint}" if self.fingerprint else ""
        return (
            f"espalier: connected to {self.superlink} {who} (node {node_id}{key}); waiting for runs"
        )


def why_refused(reason: str, node: SupernodeLog) -> str:
    """Return why the SuperLink refused a node, with a remedy, from the details of its error."""
    at = f"the SuperLink {node.superlink}"
    unknown = (
        f"{at} does not know this node's key ({node.key}, {node.fingerprint}); register it"
        f" there once: flwr supernode register {node.site or 'NAME'}.key.pub CONNECTION"
    )
    connected = (
        f"{at} still counts a node with this key as connected, for up to a minute after that"
        " node was killed; start this node again after that minute, and give each node its"
        " own key"
    )
    if UNKNOWN_KEY in reason:
        return unknown
    if KEY_WANTED in reason:
        return (
            f"{at} accepts only nodes with a registered key, and this node was started without a"
            " key; give --auth-supernode-private-key KEY, and register KEY.pub there: flwr"
            " supernode register KEY.pub CONNECTION"
        )
    if STILL_CONNECTED in reason:
        return connected
    if NOT_ACTIVATED in reason:
        return f"{unknown}\nespalier: or {connected}"
    return f"{at} refused this node: {reason}"
