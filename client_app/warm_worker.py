"""The worker of a node that stays warm: answers one task after another with the program that is installed here.

It reads tokens from its standard input, a line each, and says on its standard output when it has answered. A bundle with
another program than the installed one is refused: nothing of it is installed, imported or run. It ends when nothing came for a
while, which gives its memory back, and when whoever started it ends.

Covers: a submitter that sends a changed program. Does not cover: what the installed program does when it is asked to; the
message contracts and the site's limits do.
"""

import gc
import json
import os
import select
import sys
from typing import Any

from flwr.app import Context, Message

from client_app.flower_tasks import Desk, answer_task
from client_app.warm_node import LEAVING
from espalier.wire.code_hash import bundle_sha256, code_sha256


class AnotherProgramError(RuntimeError):
    """The run's bundle holds another program than the node's own."""


def work(bundle: bytes, message: Message, context: Context) -> Message:
    """Answer a message with the installed ClientApp.

    Raises
    ------
    AnotherProgramError
        The bundle's program is another one.
    """
    own, sent = code_sha256(), bundle_sha256(bundle)
    if own != sent:
        raise AnotherProgramError(
            f"this node runs its own program ({own[:12]}) and no other; the run's bundle is {sent[:12]}: install the same "
            "release of Espalier at all sites and where the run is submitted"
        )
    from client_app.app import app

    return app(message, context)


def main(order: dict[str, Any]) -> int:
    """Answer tasks until there is none for ``warm-seconds``, or standard input ends."""
    desk, warm_seconds = Desk(order["address"]), float(order["warm-seconds"])
    answers = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever else is printed belongs into the node's log
    lines, waiting = sys.stdin.fileno(), b""
    while True:
        if not select.select([lines], [], [], warm_seconds)[0]:
            os.write(answers, LEAVING)  # a task that is on its way is answered; else standard input ends
        read = os.read(lines, 65536)
        if not read:
            return 0
        *tokens, waiting = (waiting + read).split(b"\n")
        for token in tokens:
            answer_task(desk, token.decode(), work)
            gc.collect()
            os.write(answers, b"answered\n")


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
