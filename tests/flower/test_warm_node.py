"""Tasks of the only worker of a warm node.

Real nodes are tested in ``tests/processes``.

"""

import inspect
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import pytest
from flwr.app import Context, Message, RecordDict
from flwr.proto.runtime_pb2 import AcquireTaskResponse
from flwr.proto.task_pb2 import Task
from flwr.supercore.fab import Fab
from flwr.supercore.inflatable.inflatable_utils import ObjectPullError
from flwr.supercore.run import RunNotRunningException
from flwr.supernode.runtime import run_clientapp

from client_app.node.warm_node import Worker, answer_short_of_memory
from client_app.node.warm_worker import AnotherProgramError, fits_idle, reason_of
from espalier.cli.node import run_node
from espalier.errors import EspalierError
from espalier.flower import tasks
from espalier.hf.machine.machine_memory import machine_memory, resident

ROOT = Path(__file__).parent.parent.parent
ECHO = (
    "import sys, time\nfor line in sys.stdin:\n    open(sys.argv[1], 'a').write(line)\n   "
    " print('answered', flush=True)\n"
)
LEAVES = ECHO + "    print('leaving', flush=True)\n"
KILLED = (
    "import os, sys\nopen(sys.argv[1], 'a').write(sys.stdin.readline())\n"
    "print('pulled 6162', flush=True)\nos.kill(os.getpid(), int(sys.argv[2]))\n"
)
DIES = "import sys\nopen(sys.argv[1], 'a').write(sys.stdin.readline())\n"


class Enough(Exception):
    """Exception that ends an endless loop."""


def test_tasks_are_claimed_by_a_free_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter(["", "a task", "", "another"])
    free = iter([True, False, True, True, False, True])
    claimed: list[str] = []

    def claim(self: Any, request: Any) -> AcquireTaskResponse:
        assert request.supported_task_types == ["flwr-clientapp"]
        token = next(answers)
        return AcquireTaskResponse(token=token, task=Task(task_id=1) if token else None)

    def hand_on(token: str) -> None:
        claimed.append(token)
        if len(claimed) == 2:
            raise Enough

    heard = [Event(), Event()]
    events = iter(heard)

    def keep_claim(_: str, token: str) -> Event:
        # The claim is recorded before the worker gets the task.
        assert claimed == ([] if token == "a task" else ["a task"])
        return next(events)

    monkeypatch.setattr(tasks.RuntimeHttpClient, "AcquireTask", claim)
    monkeypatch.setattr(tasks, "keep_claim", keep_claim)
    slept: list[float] = []
    with pytest.raises(Enough):
        tasks.claim_tasks("127.0.0.1:9", lambda: next(free), hand_on, b"secret", slept.append)
    assert claimed == ["a task", "another"]
    assert slept == [tasks.ASK_SECONDS] * 5
    assert [answered.is_set() for answered in heard] == [True, False]


def test_claim_is_told_until_task_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heartbeats continue regardless of the SuperNode's answers."""
    told_twice = Event()
    beats = list[int]()

    def beat(self: Any, request: Any) -> None:
        beats.append(1)
        if len(beats) == 2:
            told_twice.set()
        raise RunNotRunningException if len(beats) == 1 else httpx.ReadTimeout("")

    monkeypatch.setattr(tasks.RuntimeHttpClient, "SendTaskHeartbeat", beat)
    monkeypatch.setattr(tasks, "CLAIM_SECONDS", 0.001)
    answered = tasks.keep_claim("127.0.0.1:9", "token")
    assert told_twice.wait(60)
    answered.set()


def until(what: Callable[[], bool]) -> None:
    """Wait until a condition is true."""
    for _ in range(3000):
        if what():
            return
        time.sleep(0.02)
    raise AssertionError("waited in vain")


@pytest.mark.parametrize("script", [ECHO, LEAVES, DIES])
def test_ended_worker_is_restarted_for_next_task(tmp_path: Path, script: str) -> None:
    """The first worker stays, the second asks to end after each answer.

    The third dies with its task.
    """
    tokens = tmp_path / "tokens"
    worker = Worker([sys.executable, "-c", script, str(tokens)])
    for number in range(3):
        assert worker.is_free()
        worker.hand_on(f"task {number}")
        until(worker.is_free)
    until(
        lambda: (
            tokens.exists() and tokens.read_text().splitlines() == ["task 0", "task 1", "task 2"]
        )
    )
    if worker._process is not None:
        worker._process.kill()


@pytest.mark.parametrize(
    ("number", "kills", "told"),
    [
        (signal.SIGKILL, [3, 4], [("task", b"ab")]),
        # The counter of memory kills did not rise, so somebody else killed the process.
        (signal.SIGKILL, [3, 3], []),
        # The system does not report kills for lack of memory.
        (signal.SIGKILL, [None, None], []),
        # Memory kills use SIGKILL, so the counter rose for another process of the group.
        (signal.SIGTERM, [3, 4], []),
    ],
)
def test_task_killed_for_memory_is_reported(
    tmp_path: Path, number: int, kills: list[int | None], told: list[tuple[str, bytes]]
) -> None:
    counts = iter(kills)
    lost = list[tuple[str, bytes]]()
    command = [sys.executable, "-c", KILLED, str(tmp_path / "tokens"), str(int(number))]
    worker = Worker(command, lambda *task: lost.append(task), lambda: next(counts))
    worker.hand_on("task")
    until(worker.is_free)
    assert lost == told


def test_lost_task_is_answered_by_node(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The worker notes the envelope of its message, and the node replies from that note.

    The reply quotes no data.
    """
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(tasks.TaskIdentity, name, 1)
    asked = Message(RecordDict(), dst_node_id=5, message_type="train")
    asked.metadata.__dict__["_message_id"] = "asked"
    noted: list[bytes] = []
    pushed: list[Message] = []
    monkeypatch.setattr(
        tasks,
        "pull_task_input",
        lambda _: (asked, Context(1, 5, {}, RecordDict(), {}), None, Fab("", b"", {})),
    )
    monkeypatch.setattr(tasks, "push_message", lambda client, reply, context: pushed.append(reply))
    monkeypatch.setattr(tasks, "push_task_output", lambda **_: None)
    address = "127.0.0.1:9"

    def killed(bundle: bytes, message: Message, context: Context) -> Message:
        raise Enough

    tasks.answer_task(address, "token", killed, lambda _: "it failed", noted.append)
    answer_short_of_memory(address, "token", noted[0])
    failed, lost = (reply.error for reply in pushed)
    assert failed.reason == "it failed"
    assert (
        lost.reason == "this node ran out of memory: the system killed the process that handled the"
        " message; see the node's log"
    )
    assert [reply.metadata.reply_to_message_id for reply in pushed] == ["asked", "asked"]
    assert {reply.metadata.dst_node_id for reply in pushed} == {asked.metadata.src_node_id}
    told = capsys.readouterr().err
    assert f"this node has {machine_memory()[0] // 10**6} MB" in told
    # The process was killed before it had the message; Flower answers a minute later.
    answer_short_of_memory(address, "token", b"")
    assert len(pushed) == 2


@pytest.mark.parametrize(
    "failure",
    [RuntimeError(tasks.NO_MESSAGES), ObjectPullError("id", "the object could not be found")],
)
def test_task_without_message_frees_the_worker(
    monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    """Its run ended, and the SuperNode deleted what it had received of the message."""
    assert tasks.NO_MESSAGES in inspect.getsource(run_clientapp)
    ended = list[str]()

    def pull(_: object) -> None:
        raise failure

    monkeypatch.setattr(tasks, "pull_task_input", pull)
    monkeypatch.setattr(tasks, "push_task_output", lambda **of: ended.append(of["details"]))
    tasks.answer_task("127.0.0.1:9", "token", lambda *_: pytest.fail("no message"), str)
    assert ended == ["the SuperNode did not receive the whole message"]


def test_oversized_worker_forgets_models_or_ends(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    held = [900]
    forgotten = list[str]()

    def forget() -> None:
        forgotten.append("model")
        held[0] -= 300

    def forget_tokens() -> None:
        forgotten.append("tokens")

    monkeypatch.setattr("client_app.node.warm_worker.resident", lambda: held[0])
    monkeypatch.setattr("espalier.training.model_cache.forget_model", forget)
    monkeypatch.setattr("espalier.data.token_cache.forget_tokens", forget_tokens)
    assert fits_idle(900)
    assert not forgotten
    assert fits_idle(700)
    assert forgotten == ["model", "tokens"]
    assert not fits_idle(200)
    assert (
        "the worker uses 0 MB, more than the 0 MB that it may use between tasks"
        in capsys.readouterr().err
    )


def test_server_is_told_expected_reasons_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert reason_of(AnotherProgramError("install the same release")) == "install the same release"
    assert capsys.readouterr().err == "espalier: install the same release\n"
    assert (
        reason_of(KeyError("a private word"))
        == "unexpected KeyError before the message was read; see this node's log"
    )
    assert "a private word" in capsys.readouterr().err


def test_resident_memory_grows_with_allocations() -> None:
    before = resident()
    block = bytearray(b"x") * (1 << 26)
    assert before + len(block) // 2 < resident() <= machine_memory()[0]


def test_a_bound_below_0_is_refused() -> None:
    with pytest.raises(EspalierError, match="--max-idle-megabytes -1: must be 0 or more"):
        run_node(ROOT, [], 0, 1.0, -1)


@pytest.mark.parametrize(
    ("words", "port", "seconds", "told"),
    [
        (
            ["--isolation", "subprocess"],
            0,
            1.0,
            "--isolation: espalier node sets this option itself",
        ),
        (["--allow-runtime-dependency-installation"], 0, 1.0, "or does not allow it; omit it"),
        (["--isol", "subprocess"], 0, 1.0, "--isol: espalier node sets this option itself"),
        (
            ["--appio-ssl-certfile=x.pem"],
            0,
            1.0,
            "--appio-ssl-certfile: espalier node sets this option itself",
        ),
        ([], 0, 0.0, "--warm-seconds 0: must be above 0"),
        (["--host", "0.0.0.0"], 0, 1.0, "--host: espalier node sets this option itself"),
        (
            ["--auth-supernode-private-key", "/no/key"],
            0,
            1.0,
            "--auth-supernode-private-key /no/key: cannot be read",
        ),
        ([], 65536, 1.0, "--port 65536: must be from 1 to 65535"),
        (
            ["--node-config", 'site="a" require-approval = "tensors"'],
            0,
            1.0,
            "Flower would ignore it",
        ),
        (
            ['--node-config=site="a" require-approvals=1'],
            0,
            1.0,
            "require-approvals: unknown key; did you mean 'require-approval'",
        ),
        (["--node-c", 'site="a/b"'], 0, 1.0, "site = 'a/b'"),
        (["--node-config"], 0, 1.0, "node-config"),
    ],
)
def test_unsafe_node_is_not_started(words: list[str], port: int, seconds: float, told: str) -> None:
    with pytest.raises(EspalierError, match=told):
        run_node(ROOT, words, port, seconds)
