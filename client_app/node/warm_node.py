"""Task queue of a warm node and its single worker process.

The worker is started with the first task, and again after it ended. If it ends during a task, that
message gets no answer, and the server asks again. If the operating system killed it because memory
was short, the server gets an error at once, and the node's log a line. Tasks that arrive while the
worker is busy wait at the SuperNode, unclaimed.
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

from espalier.errors import tell
from espalier.flower.tasks import answer_with_error, claim_tasks
from espalier.hf.machine.machine_memory import machine_memory, memory_kills

LEAVING = b"leaving\n"
"""Line that a worker writes if it had no task for long."""
PULLED = b"pulled "
"""Prefix of the line that a worker writes when it begins to work on a message."""
KILLED = "this node ran out of memory: the system killed the process that handled the message"
REMEDY = "Give it more memory, or check with `espalier plan` how much the run needs"
MEGA = 10**6
TRIES = 3
"""Number of attempts to give a task to a process that may have ended meanwhile."""


class Worker:
    """Process of the worker, if there is one.

    ``command`` starts the process. It reads tokens, one per line, and writes a line after each
    answer. It writes ``leaving`` when it would like to end, and ends when its standard input does.
    ``lost`` gets the token and the envelope of a task whose process the system killed for lack of
    memory; ``kills`` returns the number of processes that it killed.
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
        """Envelope of the current task's message, empty until the message was pulled."""
        self._lock = Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._busy: subprocess.Popen[bytes] | None = None
        """Process that works on a task."""

    def is_free(self) -> bool:
        """Return whether the worker has no task."""
        return self._busy is None

    def hand_on(self, token: str) -> None:
        """Give a task to the worker, and start a new process if the last one ended."""
        with self._lock:
            for _ in range(TRIES):
                process = self._busy = self._running()
                self._token = token
                self._envelope = b""
                assert process.stdin is not None
                # The process may end after the check and before the write.
                with suppress(OSError):
                    process.stdin.write(f"{token}\n".encode())
                    process.stdin.flush()
                    return
                self._process = self._busy = None

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            # Read before the start, so that a later, higher count includes this process.
            kills = self._kills()
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            # A thread per process; it ends with the process's output.
            Thread(target=self._listen, args=(self._process, kills), daemon=True).start()
        return self._process

    def _listen(self, process: subprocess.Popen[bytes], kills: int | None) -> None:
        """Read the process's output until its end: note answers, and let an idle process end."""
        assert process.stdout is not None
        for line in process.stdout:
            # The lock orders this with ``hand_on``: a task may arrive at the same time.
            with self._lock:
                if line.startswith(PULLED):
                    self._envelope = bytes.fromhex(line.removeprefix(PULLED).decode())
                elif line != LEAVING:
                    self._note_free(process)
                elif self._busy is not process:
                    # A task that was handed on in the meantime is answered first.
                    self._let_go(process)
        # SIGKILL could have other senders, so the system's counter of memory kills is compared too.
        if (
            process.wait() == -signal.SIGKILL
            and kills is not None
            and (self._kills() or 0) > kills
            and self._busy is process
        ):
            # The server gets an error now and need not wait for the deadline.
            self._lost(self._token, self._envelope)
        with self._lock:
            self._note_free(process)

    # A process that was replaced must not free the new one's task.
    def _note_free(self, process: subprocess.Popen[bytes]) -> None:
        if self._busy is process:
            self._busy = None

    def _let_go(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None
        # The end of its standard input ends the process.
        with suppress(OSError):
            process.stdin.close()
        if self._process is process:
            self._process = None


def main(order: dict[str, Any]) -> int:
    """Serve a SuperNode: ``address``, ``warm-seconds``, ``max-idle-bytes``, ``secret`` (in hex)."""
    # With this setting, OpenMP threads of a worker that waits for a task do not use the CPU.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    arguments = json.dumps(
        {key: order[key] for key in ("address", "warm-seconds", "max-idle-bytes")}
    )
    address = order["address"]
    worker = Worker(
        # ``-P``: modules of the current directory must not be imported.
        [sys.executable, "-P", "-m", "client_app.node.warm_worker", arguments],
        lambda *task: answer_short_of_memory(address, *task),
    )
    claim_tasks(address, worker.is_free, worker.hand_on, bytes.fromhex(order["secret"]))
    return 0


def answer_short_of_memory(address: str, token: str, envelope: bytes) -> None:
    """Report to the node's log and to the server that the system killed the working process."""
    megabytes = machine_memory()[0] // MEGA
    tell(f"{KILLED}; this node has {megabytes} MB. {REMEDY}")
    if envelope:
        answer_with_error(address, token, envelope, f"{KILLED}; see the node's log")
