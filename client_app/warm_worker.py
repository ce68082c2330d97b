"""The worker of a node that stays warm: answers one task after another with the program that is installed here.

It reads tokens from its standard input, a line each, and says on its standard output when it has answered. A bundle with
another program than the installed one is refused: nothing of it is installed, imported or run. It ends when nothing came for a
while, which gives its memory back, and at once when whoever started it ends. Where it holds more memory between tasks than it
may, it lets the model go that it trained last; if that is not enough, it ends.

Covers: a submitter that sends a changed program. Does not cover: what the installed program does when it is asked to; the
message contracts and the site's limits do.
"""

import gc
import json
import os
import sys
import traceback
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, NoReturn

from flwr.app import Context, Message

from client_app.no_answer import NoAnswerError
from client_app.warm_node import LEAVING, PULLED
from espalier.flower.tasks import Desk, answer_task
from espalier.modeling.machine_memory import machine_memory, resident
from espalier.wire.code_hash import bundle_sha256, code_sha256

MEGA = 10**6
OF_THE_MACHINE = 2
"""Of the memory that there is a half may be held between tasks, where nothing else is said."""


class AnotherProgramError(NoAnswerError):
    """The run's bundle holds another program than the node's own."""


def work(bundle: bytes, message: Message, context: Context) -> Message:
    """Answer a message with the installed ClientApp.

    Raises
    ------
    AnotherProgramError
        The bundle's program is another one.
    """
    own = code_sha256()
    sent = bundle_sha256(bundle)
    if own != sent:
        raise AnotherProgramError(
            f"this node runs its own program ({own[:12]}) and no other; the run's bundle is"
            f" {sent[:12]}: install the same release of Espalier at all sites and where the run is"
            " submitted"
        )
    from client_app.app import app

    return app(message, context)


def told(error: BaseException) -> str:
    """What the server is told of an error in place of an answer; the node's log has all of it."""
    if isinstance(error, NoAnswerError):
        print(f"espalier: {error}", file=sys.stderr, flush=True)
        return str(error)
    traceback.print_exception(error)
    return f"unexpected {type(error).__name__} before the message was read; see this node's log"


def main(order: dict[str, Any]) -> NoReturn:
    """Answer tasks until standard input ends, which is asked for when there is none for ``warm-seconds``."""
    desk = Desk(order["address"])
    warm_seconds = float(order["warm-seconds"])
    most_idle = int(order["most-idle-bytes"]) or machine_memory()[0] // OF_THE_MACHINE
    answers = os.dup(sys.stdout.fileno())
    # Whatever else is printed belongs into the node's log.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    tokens: SimpleQueue[str] = SimpleQueue()
    Thread(target=_read, args=(tokens,), daemon=True).start()
    while True:
        try:
            token = tokens.get(timeout=warm_seconds)
        except Empty:
            # A task that is on its way is answered; else standard input ends.
            os.write(answers, LEAVING)
            continue
        answer_task(
            desk,
            token,
            work,
            told,
            lambda envelope: _write(answers, PULLED + envelope.hex().encode() + b"\n"),
        )
        gc.collect()
        keeps = fits_idle(most_idle)
        os.write(answers, b"answered\n" if keeps else b"answered\n" + LEAVING)


def fits_idle(most: int) -> bool:
    """Whether this process, when it has let go what it can, holds no more than ``most`` bytes."""
    if resident() <= most:
        return True
    if (shelf := sys.modules.get("espalier.training.kept_model")) is not None:
        shelf.forget_model()
    if (held := resident()) <= most:
        return True
    print(
        f"espalier: the worker holds {held // MEGA} MB, may hold {most // MEGA} MB between tasks,"
        " and ends",
        file=sys.stderr,
    )
    return False


def _write(file: int, data: bytes) -> None:
    while data:
        data = data[os.write(file, data) :]


def _read(tokens: "SimpleQueue[str]") -> None:
    """Take tokens in while others are answered; where there is nobody left who would hear an answer, the process ends."""
    for line in sys.stdin:
        tokens.put(line.rstrip("\n"))
    os._exit(0)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
