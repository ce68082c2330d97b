"""A node's tasks and the one worker that answers them: started with the first task, and again after it ended.

A process that ends in mid-task costs that message's answer, which the server asks for again. One that the system killed because
memory was short is told to the server at once, and in the node's log. Tasks that come while the worker
works wait at the SuperNode, unclaimed.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import Lock, Thread
from typing import Any

from espalier.flower.tasks import Desk, answer_with_error, claim_tasks
from espalier.modeling.machine_memory import machine_memory, memory_kills

LEAVING = b"leaving\n"
"""What a worker writes that had no task for long."""
PULLED = b"pulled "
"""What a worker writes before the envelope of the message that it begins to work on."""
KILLED = "memory was short at this node: the system killed the process that worked on the message"
REMEDY = "Give it more, or see with `espalier plan` what the run takes"
MEGA = 10**6
TRIES = 3
"""How often a task is handed to a process that ended meanwhile."""


class Worker:
    """The worker's process, if there is one.

    Parameters
    ----------
    command : starts it; it reads tokens, a line each, and writes a line when it has answered one, or ``leaving`` when it would
        like to end, which it does when its standard input ends
    lost : called with the token and the envelope of a task that was in hand when the system killed the process for memory
    kills : counts the processes that the system killed for memory
    """

    def __init__(
        self,
        command: Sequence[str],
        lost: Callable[[str, bytes], None] = lambda *_: None,
        kills: Callable[[], int | None] = memory_kills,
    ) -> None:
        self._command = command
        self._lost = lost
        self._kills = kills
        self._token = ""
        self._envelope = b""
        """Of the task in hand; the envelope is empty until the message was pulled."""
        self._lock = Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._busy: subprocess.Popen[bytes] | None = None
        """The process that has a task in hand."""

    def is_free(self) -> bool:
        """Whether it has nothing in hand."""
        return self._busy is None

    def hand_on(self, token: str) -> None:
        """Let it answer a task; where its process has ended, another one is started."""
        with self._lock:
            for _ in range(TRIES):
                process = self._busy = self._running()
                self._token = token
                self._envelope = b""
                assert process.stdin is not None
                with suppress(OSError):
                    process.stdin.write(f"{token}\n".encode())
                    process.stdin.flush()
                    return
                self._process = self._busy = None

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            kills = self._kills()
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            Thread(target=self._listen, args=(self._process, kills), daemon=True).start()
        return self._process

    def _listen(self, process: subprocess.Popen[bytes], kills: int | None) -> None:
        """Note answers, and let a process go that has nothing in hand; one that ended has no answer left to give."""
        assert process.stdout is not None
        for line in process.stdout:
            with self._lock:
                if line.startswith(PULLED):
                    self._envelope = bytes.fromhex(line.removeprefix(PULLED).decode())
                elif line != LEAVING:
                    self._note_free(process)
                elif self._busy is not process:
                    self._let_go(process)
        if (
            process.wait() == -signal.SIGKILL
            and kills is not None
            and (self._kills() or 0) > kills
            and self._busy is process
        ):
            self._lost(self._token, self._envelope)
        with self._lock:
            self._note_free(process)

    def _note_free(self, process: subprocess.Popen[bytes]) -> None:
        if self._busy is process:
            self._busy = None

    def _let_go(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None
        with suppress(OSError):
            process.stdin.close()
        if self._process is process:
            self._process = None


def main(order: dict[str, Any]) -> int:
    """Serve a SuperNode; ``order`` has its ``address``, ``warm-seconds``, ``most-idle-bytes`` and ``secret``, hexadecimal."""
    # A worker that waits for a task does not spin.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    told = json.dumps({key: order[key] for key in ("address", "warm-seconds", "most-idle-bytes")})
    desk = Desk(order["address"])
    worker = Worker(
        [sys.executable, "-P", "-m", "client_app.warm_worker", told],
        lambda *task: answer_short_of_memory(desk, *task),
    )
    claim_tasks(desk, worker.is_free, worker.hand_on, bytes.fromhex(order["secret"]))
    return 0


def answer_short_of_memory(desk: Desk, token: str, envelope: bytes) -> None:
    """Say in the node's log, and to the server, that the system killed the process that had a task in hand."""
    megabytes = machine_memory()[0] // MEGA
    print(
        f"espalier: {KILLED}; this node has {megabytes} MB. {REMEDY}", file=sys.stderr, flush=True
    )
    if envelope:
        answer_with_error(desk, token, envelope, f"{KILLED}; the node's log says more")
