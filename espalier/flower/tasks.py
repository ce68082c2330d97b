"""Tasks of a SuperNode for a process that stays warm: how they are claimed, pulled and answered.

Flower's own node starts a process for every task and installs in it what the submitter of the run sent. Here a task's token
goes to whoever is there, and the submitter's bundle is only looked at. The names that are imported are private to Flower.
"""

import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from threading import Event, Thread

import httpx
from flwr.app import Context, Error, Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.constant import ErrorCode, SubStatus
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.proto.runtime_pb2 import AcquireTaskRequest, SendTaskHeartbeatRequest
from flwr.supercore.constant import TaskType
from flwr.supercore.heartbeat import HeartbeatSender, make_task_heartbeat_fn_http
from flwr.supercore.interceptors import (
    RuntimeTokenHttpInterceptor,
    RuntimeVersionHttpInterceptor,
    SuperExecAuthHttpInterceptor,
)
from flwr.supercore.protobuf.client import ProtobufClientInterceptor
from flwr.supercore.retry import RetryInvoker, make_simple_http_retry_invoker
from flwr.supercore.run import RunNotRunningException
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.task_identity import TaskIdentity
from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message, push_task_output

from espalier.settings.mistakes import INTERRUPTS

ASK_SECONDS = 0.1
"""Time between two questions for a task."""
CLAIM_SECONDS = 8.0
"""Time between two messages that a task is in hand; without one for 30 seconds it counts as lost."""
CLAIM = "/flwr.proto.Runtime/AcquireTask"

Told = Callable[[BaseException], str]
"""Of an error what the server is told."""
Work = Callable[[bytes, Message, Context], Message]
"""Of the submitter's bundle, a message and its context: the reply."""


@dataclass(frozen=True)
class Desk:
    """Where a SuperNode hands its tasks out, on this machine."""

    address: str
    """host:port of its Runtime API, without TLS: it is a loopback address."""


def claim_tasks(
    desk: Desk,
    is_free: Callable[[], bool],
    hand_on: Callable[[str], None],
    secret: bytes,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Claim tasks one by one, whenever somebody is free, and hand their tokens on; it does not return.

    A SuperNode that does not answer is asked again, as long as this process lives.

    Parameters
    ----------
    secret : what the SuperNode knows too, so that nobody else on the machine can claim its tasks
    """
    signed = SuperExecAuthHttpInterceptor(
        master_secret=secret, protected_methods=frozenset({CLAIM})
    )
    client = _client(desk, signed, make_simple_http_retry_invoker(), "SuperExec")
    request = AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP])
    answered = Event()
    while True:
        if is_free():  # what is claimed must be answered, so nothing is while the worker works
            answered.set()
            answer = client.AcquireTask(request)
            if answer.HasField("task") and answer.token:
                answered = keep_claim(desk, answer.token)
                hand_on(answer.token)
        sleep(ASK_SECONDS)


def keep_claim(desk: Desk, token: str) -> Event:
    """Tell the SuperNode again and again that a claimed task is in hand, until the event that is returned is set.

    A SuperNode gives a task to somebody else of whom it has not heard for half a minute. On a busy machine a worker may take
    longer to start. What the SuperNode answers does not matter here: whether the task still counts, the worker hears itself.
    """
    answered = Event()
    client = _client(desk, RuntimeTokenHttpInterceptor(token), None)

    def tell() -> None:
        while not answered.wait(CLAIM_SECONDS):
            with suppress(httpx.HTTPError, RunNotRunningException):
                client.SendTaskHeartbeat(SendTaskHeartbeatRequest())
        client.close()

    Thread(target=tell, daemon=True).start()
    return answered


def answer_task(
    desk: Desk, token: str, work: Work, told: Told, note: Callable[[bytes], None] = lambda _: None
) -> None:
    """Pull a task, answer it and push the reply, as Flower's ``run_clientapp`` does, but for what is installed and run.

    Parameters
    ----------
    note : hears the envelope of the message before the work begins; with it ``answer_with_error`` can answer in another process
    """
    invoker = make_simple_http_retry_invoker()
    client = _client(desk, RuntimeTokenHttpInterceptor(token), invoker)
    # a connection of its own: one that calls again by itself would hold up the end of a worker whose SuperNode is gone
    beating = _client(desk, RuntimeTokenHttpInterceptor(token), None)
    heartbeat = HeartbeatSender(make_task_heartbeat_fn_http(beating))
    context: Context | None = None
    status = SubStatus.FAILED
    details = "the task could not be pulled"
    try:
        heartbeat.start()
        message, context, _, bundle = pull_task_input(client)
        note(message_to_proto(remove_content_from_message(message)).SerializeToString())
        try:
            reply = work(bundle.content, message, context)
            status = SubStatus.COMPLETED
            details = ""
        except INTERRUPTS:
            raise
        except BaseException as error:
            details = told(error)
            reply = Message(
                Error(code=ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason=details), reply_to=message
            )
        push_message(client, reply, context)
    except RunNotRunningException:
        details = "the run has ended meanwhile"
    except httpx.HTTPError as error:
        details = f"the SuperNode does not answer: {error}"
    finally:
        invoker.max_tries = 1
        push_task_output(client=client, context=context, sub_status=status, details=details)
        if heartbeat.is_running:
            heartbeat.stop()
        beating.close()
        client.close()


def answer_with_error(desk: Desk, token: str, envelope: bytes, reason: str) -> None:
    """Answer a task in place of the process that had it in hand and is gone.

    Parameters
    ----------
    envelope : of the message, as ``answer_task`` noted it
    reason : what the server is told
    """
    message = message_from_proto(ProtoMessage.FromString(envelope))
    TaskIdentity.run_id = message.metadata.run_id
    TaskIdentity.node_id = message.metadata.dst_node_id
    TaskIdentity.task_id = message.metadata.dst_task_id or 0
    invoker = make_simple_http_retry_invoker()
    invoker.max_tries = 1
    client = _client(desk, RuntimeTokenHttpInterceptor(token), invoker)
    reply = Message(Error(code=ErrorCode.CLIENT_APP_CRASHED, reason=reason), reply_to=message)
    try:
        push_message(
            client,
            reply,
            Context(message.metadata.run_id, message.metadata.dst_node_id, {}, RecordDict(), {}),
        )
        push_task_output(client=client, context=None, sub_status=SubStatus.FAILED, details=reason)
    except RunNotRunningException:
        pass  # nobody waits for it any more
    except httpx.HTTPError as error:  # the SuperNode answers in its own words a minute later
        print(f"espalier: the SuperNode does not answer: {error}", file=sys.stderr, flush=True)
    finally:
        client.close()


def _client(
    desk: Desk,
    proof: ProtobufClientInterceptor,
    invoker: RetryInvoker | None,
    component: str = "flwr-clientapp",
) -> RuntimeHttpClient:
    """Return a connection to a SuperNode.

    Parameters
    ----------
    proof : shows the SuperNode who calls
    invoker : calls again while the SuperNode does not answer, and interrupts this process where a token counts no more
        (Flower's ``http_retry``); None: errors are raised
    component : name of the caller
    """
    return RuntimeHttpClient.from_server_address(
        server_address=desk.address,
        insecure=True,
        root_certificates=None,
        interceptors=[RuntimeVersionHttpInterceptor(component_name=component), proof],
        retry_invoker=invoker,
    )
