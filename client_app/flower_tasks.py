"""What a node that stays warm takes of Flower beside its public interface: how tasks are claimed, pulled and answered.

Nothing else of Espalier touches these parts, which may change with any version of Flower;
``tests/federation/test_warm_node.py`` names the one that they were tried with. Flower's own node starts a process for every
task and installs in it what the submitter of the run sent. Here a task's token goes to whoever is there, and the submitter's
bundle is only looked at.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc  # type: ignore[import-untyped]
from flwr.app import Context, Error, Message
from flwr.common.constant import ErrorCode, SubStatus
from flwr.common.grpc import create_channel
from flwr.common.retry_invoker import make_simple_grpc_retry_invoker, wrap_stub
from flwr.proto.clientappio_pb2_grpc import ClientAppIoStub
from flwr.proto.task_pb2 import Task
from flwr.supercore.heartbeat import HeartbeatSender, make_task_heartbeat_fn_grpc
from flwr.supercore.interceptors import AppIoTokenClientInterceptor, RuntimeVersionClientInterceptor
from flwr.supercore.superexec.executor import LaunchResult
from flwr.supercore.superexec.plugin import ClientAppExecPlugin
from flwr.supercore.superexec.run_superexec import run_superexec
from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message, push_task_output

from espalier.settings.mistakes import INTERRUPTS

FLOWER = "1.31"
"""The version that all this was tried with."""

ASKED_EVERY_SECONDS = 0.2
"""How often a SuperNode is asked for tasks; ``run_superexec`` by itself asks every second."""

Told = Callable[[BaseException], str]
"""Of an error what the server is told."""
Work = Callable[[bytes, Message, Context], Message]
"""Of the submitter's bundle, a message and its context: the reply."""


@dataclass(frozen=True)
class Desk:
    """Where a SuperNode hands its tasks out, on this machine."""

    address: str
    """host:port of its ClientAppIo API, without TLS: it is a loopback address."""


def claim_tasks(desk: Desk, is_free: Callable[[], bool], hand_on: Callable[[str], None], secret: bytes) -> None:
    """Claim tasks one by one, whenever somebody is free, and hand their tokens on; it does not return.

    Parameters
    ----------
    secret : what the SuperNode knows too, so that nobody else on the machine can claim its tasks
    """

    class Reception(ClientAppExecPlugin):
        def select_task(self, candidate_tasks: Sequence[Task]) -> Task | None:
            return super().select_task(candidate_tasks) if is_free() else None

        def launch_task(self, token: str, task: Task) -> LaunchResult:
            hand_on(token)
            return LaunchResult.accepted()

    class Asking(ClientAppIoStub):
        def __init__(self, channel: Any) -> None:
            super().__init__(channel)
            self.PullPendingTasks = until_there_are_tasks(self.PullPendingTasks)

    run_superexec(Reception, Asking, desk.address, insecure=True, superexec_auth_secret=secret)


def until_there_are_tasks(ask: Callable[..., Any], sleep: Callable[[float], None] = time.sleep) -> Callable[..., Any]:
    """Ask again and again, so that a task that comes to an idle node waits for a fifth of a second, and not for a whole one.

    Behind each task that it took, and where nobody is free, ``run_superexec`` pauses for a second all the same.
    """

    def asked(*args: Any, **kwargs: Any) -> Any:
        while not (answer := ask(*args, **kwargs)).tasks:
            sleep(ASKED_EVERY_SECONDS)
        return answer

    return asked


def answer_task(desk: Desk, token: str, work: Work, told: Told) -> None:
    """Pull a task, answer it and push the reply, as Flower's ``run_clientapp`` does, but for what is installed and run."""
    interceptors = [RuntimeVersionClientInterceptor(component_name="flwr-clientapp"), AppIoTokenClientInterceptor(token)]
    channel = create_channel(server_address=desk.address, insecure=True, interceptors=interceptors)
    stub = ClientAppIoStub(channel)
    invoker = make_simple_grpc_retry_invoker()
    wrap_stub(stub, invoker)
    heartbeat = HeartbeatSender(make_task_heartbeat_fn_grpc(stub))
    context: Context | None = None
    status, details = SubStatus.FAILED, "the task could not be pulled"
    try:
        heartbeat.start()
        message, context, _, bundle = pull_task_input(stub)
        try:
            reply = work(bundle.content, message, context)
            status, details = SubStatus.COMPLETED, ""
        except INTERRUPTS:
            raise
        except BaseException as error:
            details = told(error)
            reply = Message(Error(code=ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason=details), reply_to=message)
        push_message(stub, reply, context)
    except grpc.RpcError as error:
        details = f"the SuperNode does not answer: {error}"
    finally:
        invoker.max_tries = 1
        push_task_output(stub=stub, context=context, sub_status=status, details=details)
        if heartbeat.is_running:
            heartbeat.stop()
        channel.close()
