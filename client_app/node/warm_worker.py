"""Worker process of a warm node, which answers tasks with the program that is installed here.

The worker reads tokens from its standard input, one per line, and writes a line to its standard
output after each answer. A bundle with another program than the installed one is refused: nothing
in it is installed, imported or run. The worker ends after a period without tasks, which frees its
memory, and at once if the process that started it ends. If it holds more memory between tasks than
permitted, it releases the model that it trained last. If that is not enough, it ends.

Covers: a submitter that sends a changed program.

Does not cover: what the installed program does on request; contracts and the site policy limit
that.
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

from client_app.node.warm_node import LEAVING, PULLED
from espalier.errors import NoAnswerError, tell
from espalier.flower.pulls import ask_again_soon
from espalier.flower.tasks import answer_task
from espalier.hf.machine.machine_memory import machine_memory, resident
from espalier.identity.code_hash import bundle_sha256, code_sha256

MEGA = 10**6
OF_THE_MACHINE = 2
"""Divisor of the machine's memory that gives the default memory limit between tasks."""


class AnotherProgramError(NoAnswerError):
    """Error for a run whose bundle contains another program than the node's own."""


def work(bundle: bytes, message: Message, context: Context) -> Message:
    """Answer with the installed ClientApp, or raise AnotherProgramError if the bundle differs."""
    installed = code_sha256()
    sent = bundle_sha256(bundle)
    # Compare before anything of the bundle is unpacked or imported.
    if installed != sent:
        raise AnotherProgramError(
            f"this node runs only its installed program ({installed[:12]}), but the run's bundle is"
            f" {sent[:12]}: install the same release of Espalier at all sites and where the run"
            " is submitted"
        )
    from client_app.app import app

    return app(message, context)


def reason_of(error: BaseException) -> str:
    """Return the error text for the server. The full error is in the node's log only."""
    if isinstance(error, NoAnswerError):
        tell(error)
        return str(error)
    # The text may contain data, so it stays in this node's log.
    traceback.print_exception(error)
    return f"unexpected {type(error).__name__} before the message was read; see this node's log"


def main(order: dict[str, Any]) -> NoReturn:
    """Answer tasks; after ``warm-seconds`` without a task, ask to be dismissed."""
    address = order["address"]
    warm_seconds = float(order["warm-seconds"])
    max_idle = int(order["max-idle-bytes"]) or machine_memory()[0] // OF_THE_MACHINE
    # The original standard output is the channel to the SuperNode.
    answers = os.dup(sys.stdout.fileno())
    # All other output belongs in the node's log, so it must not reach the original stdout.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    ask_again_soon()
    tokens: SimpleQueue[str] = SimpleQueue()
    Thread(target=_read, args=(tokens,), daemon=True).start()
    while True:
        try:
            token = tokens.get(timeout=warm_seconds)
        except Empty:
            # A task that is already on its way is still answered. Otherwise standard input ends.
            os.write(answers, LEAVING)
            continue
        answer_task(
            address,
            token,
            work,
            reason_of,
            lambda envelope: _write(answers, PULLED + envelope.hex().encode() + b"\n"),
        )
        # Tensors in reference cycles would count as memory between tasks.
        gc.collect()
        keeps = fits_idle(max_idle)
        # One write, so that no task is handed on between both lines.
        os.write(answers, b"answered\n" if keeps else b"answered\n" + LEAVING)


def fits_idle(most: int) -> bool:
    """Return whether this process holds at most ``most`` bytes after it released what it can."""
    if resident() <= most:
        return True
    # Importing it here would load torch in a worker that trained nothing.
    if (shelf := sys.modules.get("espalier.training.model_cache")) is not None:
        shelf.forget_model()
    if (tokens := sys.modules.get("espalier.data.token_cache")) is not None:
        tokens.forget_tokens()
    if (used := resident()) <= most:
        return True
    tell(
        f"the worker uses {used // MEGA} MB, more than the {most // MEGA} MB that it"
        " may use between tasks, and ends"
    )
    return False


def _write(file: int, data: bytes) -> None:
    # ``os.write`` may write less than it is given.
    while data:
        data = data[os.write(file, data) :]


def _read(tokens: "SimpleQueue[str]") -> None:
    """Read tokens while others are answered; without input there is no receiver of answers."""
    for line in sys.stdin:
        tokens.put(line.rstrip("\n"))
    # This is a thread, in which ``sys.exit`` would not end the process.
    os._exit(0)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
