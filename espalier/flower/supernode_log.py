"""Filter for the output of ``flower-supernode`` that explains connections and refusals.

Flower says that a SuperLink refused a node, but not why or what to do. A sentence follows its line.
"""

import re
import sys
from collections.abc import Iterable

CONNECTED = re.compile(r"SuperNode ID: (\d+)")
REFUSED = re.compile(r"^\[code: \d+\] (.*)$")
"""Pattern of the line with the SuperLink's reason in Flower's error."""
NOT_ACTIVATED = "Failed to activate SuperNode"
"""Reason for an unknown key, and for one with which another node is connected."""
KEY_WANTED = "must be registered via the CLI"


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

    def pass_on(self, lines: Iterable[str]) -> None:
        """Print the lines, and a sentence after some of them, until the input ends."""
        for line in lines:
            for shown in self.heard(line):
                print(shown, file=sys.stderr, flush=True)

    def heard(self, line: str) -> list[str]:
        """Return the lines to print after a new line."""
        line = line.rstrip("\n")
        if found := CONNECTED.search(line):
            return [line, self._connected(found[1])]
        if found := REFUSED.match(line):
            return [line, f"espalier: {why_refused(found[1], self)}"]
        return [line]

    def _connected(self, node_id: str) -> str:
        who = f"as {self.site}" if self.site else "as a node without a site name"
        key = f", with the key {self.fingerprint}" if self.fingerprint else ""
        return (
            f"espalier: connected to {self.superlink} {who} (node {node_id}{key}); waiting for runs"
        )


def why_refused(reason: str, node: SupernodeLog) -> str:
    """Return why the SuperLink refused a node, with a remedy, from the reason that it gave."""
    at = f"the SuperLink {node.superlink}"
    if NOT_ACTIVATED in reason and node.key:
        return (
            f"{at} does not know this node's key ({node.key}, {node.fingerprint}), or still counts"
            " a node with this key as connected. Register the key there once: flwr supernode"
            f" register {node.site or 'NAME'}.key.pub CONNECTION. If it is registered, give each"
            " node its own key, and start a node that was killed again after a minute"
        )
    if KEY_WANTED in reason:
        return (
            f"{at} accepts only nodes with a registered key, and this node was started without a"
            " key; give --auth-supernode-private-key KEY, and register KEY.pub there: flwr"
            " supernode register KEY.pub CONNECTION"
        )
    return f"{at} refused this node: {reason}"
