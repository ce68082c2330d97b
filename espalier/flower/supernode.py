"""``flower-supernode`` with shorter polling intervals while its site takes part in a run.

Flower's SuperNode asks the SuperLink for a message and sleeps three seconds if there is none, which
is half of a short round. It checks for its reply twice a second. Both intervals are constants in
its code. Here they are shorter for a while after each message. At idle nodes they are Flower's own,
so that these do not burden the SuperLink.

Flower's SuperNode sends a reply only after it received a message, and then the first reply that is
ready. If a run ends while the node receives one of its messages, the reply to it is left over. From
then on each reply would wait for the next message. Here replies are also sent between messages.

    python -m espalier.flower.supernode OPTIONS        options of flower-supernode

If a run ends while the node receives one of its messages, Flower's SuperNode keeps the half of the
message that it has, and the process that is to work on it waits for the rest for ever. Here the
message is deleted, as Flower does after any other failure.

Flower says that a SuperLink refused a node, but not why or what to do. A sentence follows its line.
"""

import re
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from espalier.flower.pulls import ask_again_soon

ASK_SECONDS = 0.2
"""Seconds between two requests for a message at a busy node."""
REPLY_SECONDS = 0.05
"""Seconds between two checks for a reply, which is on this machine."""
BUSY_SECONDS = 120.0
"""Seconds after the last message for which a node counts as busy."""
IDLE_SECONDS = 3.0
"""Seconds between two requests for a message at an idle node, as in Flower's loop."""
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

    # Everything but ``sleep`` is that of the module.
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


class NothingToSend(Exception):
    """No reply is ready."""


class ReadyReplies:
    """Node state that Flower's function for sending does not wait for."""

    def __init__(self, state: Any) -> None:
        self._state = state

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._state, name)
        # Only reading of replies must not wait.
        return (
            partial(_at_once, attribute)
            if name in ("get_messages", "get_messages_legacy")
            else attribute
        )


def _at_once(get_messages: Callable[..., Sequence[Any]], **filters: Any) -> Sequence[Any]:
    """Return the messages, or raise NothingToSend if there are none."""
    if not (messages := get_messages(**filters)):
        raise NothingToSend
    return messages


class RunEndedError(Exception):
    """Run that ended while one of its messages was received."""


class ClaimableTasks:
    """Node state in which a task whose message was deleted stays claimable.

    Flower ends such a task, and with it the process that has claimed it already. Here that process
    finds no message, reports that, and is free for the next task.
    """

    def __init__(self, state: Any) -> None:
        self._state = state

    def __getattr__(self, name: str) -> Any:
        return getattr(self._state, name)

    # Flower would end the task as failed.
    def finish_task(self, *_: Any, **__: Any) -> bool:
        """Leave the task to the process that claims it."""
        return True


def _as_failure(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that fails with RunEndedError if the run has ended.

    Flower's own exception is no ``Exception``, so its function for receiving would not clean up.
    """
    from flwr.supercore.run import RunNotRunningException

    def checked(*arguments: Any) -> Any:
        try:
            return call(*arguments)
        except RunNotRunningException:
            raise RunEndedError("the run has ended") from None

    return checked


class Steps:
    """The two steps of Flower's loop, receiving and sending; sending is never left out."""

    def __init__(
        self,
        receive: Callable[..., int | None],
        send: Callable[..., None],
        sleep: Callable[[float], None],
    ) -> None:
        self._receive = receive
        self._send = send
        self._sleep = sleep
        self._received = False

    def receive(
        self,
        *,
        state: Any,
        pull_object: Callable[..., bytes],
        confirm_message_received: Callable[..., None],
        **arguments: Any,
    ) -> int:
        """Receive a message if there is one. Flower's loop goes on to sending in any case."""
        # Wrapped functions: an ended run becomes an error after which Flower cleans up.
        run_id = self._receive(
            state=ClaimableTasks(state),
            pull_object=_as_failure(pull_object),
            confirm_message_received=_as_failure(confirm_message_received),
            **arguments,
        )
        self._received = run_id is not None
        # 0 stands for no run; Flower's loop then goes on to sending.
        return run_id or 0

    def send(self, *, state: Any, **arguments: Any) -> None:
        """Send the reply to the message that was received, or the replies that are left over."""
        if self._received:
            self._send(state=state, **arguments)
            return
        try:
            self._send(state=ReadyReplies(state), **arguments)
        except NothingToSend:
            # Flower's receiving would sleep for as long.
            self._sleep(IDLE_SECONDS)


def main() -> None:
    """Run Flower's program with these waits and steps."""
    from flwr.supernode import start_client_internal
    from flwr.supernode.cli import flower_supernode

    # The module looks names up in its own namespace, so only Flower's loop is affected.
    namespace = vars(start_client_internal)
    waits = Waits()
    steps = Steps(namespace["_pull_and_store_message"], namespace["_push_messages"], waits.sleep)
    namespace["time"] = waits
    namespace["_pull_and_store_message"] = steps.receive
    namespace["_push_messages"] = steps.send
    ask_again_soon()
    # Flower's messages name the program by this argument.
    sys.argv[0] = "flower-supernode"
    flower_supernode()


CONNECTED = re.compile(r"SuperNode ID: (\d+)")
REFUSED = re.compile(r"^\[code: \d+\] (.*)$")
"""Pattern of the line with the SuperLink's reason in Flower's error."""
NOT_ACTIVATED = "Failed to activate SuperNode"
"""Reason for an unknown key, and for one with which another node is connected."""
KEY_WANTED = "must be registered via the CLI"


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

    def pass_on(self, lines: Iterable[str]) -> None:
        """Print the lines, and a sentence after some of them, until the input ends."""
        for line in lines:
            for shown in self.heard(line):
                print(shown, file=sys.stderr, flush=True)

    def heard(self, line: str) -> list[str]:
        """Return the lines to print after a new line."""
        line = line.rstrip("\n")
        if match := CONNECTED.search(line):
            identity = f"as {self.site}" if self.site else "as a node without a site name"
            key = f", with the key {self.fingerprint}" if self.fingerprint else ""
            description = f"connected to {self.superlink} {identity} (node {match[1]}{key})"
            return [line, f"espalier: {description}; waiting for runs"]
        if match := REFUSED.match(line):
            return [line, f"espalier: {why_refused(match[1], self)}"]
        return [line]


def why_refused(reason: str, node: SupernodeLog) -> str:
    """Return why the SuperLink refused a node, with a remedy, from the reason that it gave."""
    superlink = f"the SuperLink {node.superlink}"
    if NOT_ACTIVATED in reason and node.key:
        return (
            f"{superlink} does not know this node's key ({node.key}, {node.fingerprint}), or still"
            " counts a node with this key as connected. Register the key there once: flwr supernode"
            f" register {node.site or 'NAME'}.key.pub CONNECTION. If it is registered, give each"
            " node its own key, and start a node that was killed again after a minute"
        )
    if KEY_WANTED in reason:
        return (
            f"{superlink} accepts only nodes with a registered key, and this node was started"
            " without a key; give --auth-supernode-private-key KEY, and register KEY.pub there:"
            " flwr supernode register KEY.pub CONNECTION"
        )
    return f"{superlink} refused this node: {reason}"


if __name__ == "__main__":
    main()
