"""Tasks of a SuperNode for a warm process: claim, pull and answer them.

Flower's own node starts a process for every task and installs in it the bundle that the run's
submitter sent. Here the token of a task goes to a running process, and the bundle is only
inspected. The names that are imported here are private to Flower. ``address`` is the ``host:port``
of the SuperNode's Runtime API on this machine; a loopback address, so without TLS.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from threading import Event, Thread

import httpx
from flwr.app import Context, Error, Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.constant import ErrorCode, SubStatus
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.proto.runtime_pb2 import AcquireTaskRequest, SendTaskHeartbeatRequest
from flwr.supercore.constant import TaskType
from flwr.supercore.fab import Fab
from flwr.supercore.heartbeat import HeartbeatSender, make_task_heartbeat_fn_http
from flwr.supercore.inflatable.inflatable_utils import ObjectPullError
from flwr.supercore.interceptors import (
    RuntimeTokenHttpInterceptor,
    RuntimeVersionHttpInterceptor,
    SuperExecAuthHttpInterceptor,
)
from flwr.supercore.protobuf.client import ProtobufClientInterceptor
from flwr.supercore.retry import RetryInvoker, make_simple_http_retry_invoker
from flwr.supercore.run import Run, RunNotRunningException
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.task_identity import TaskIdentity
from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message, push_task_output

from espalier.errors import INTERRUPTS, tell

ASK_SECONDS = 0.1
"""Seconds between two requests for a task."""
CLAIM_SECONDS = 8.0
"""Seconds between two heartbeats for a task; after 30 seconds without one it counts as lost."""
NO_MESSAGES = "No messages received from Runtime API"
"""Text of Flower's RuntimeError for a task without a message."""
CLAIM = "/flwr.proto.Runtime/AcquireTask"

ReasonOf = Callable[[BaseException], str]
"""Function that returns the text for the server about an error."""
Work = Callable[[bytes, Message, Context], Message]
"""Function that takes the submitter's bundle, a message and its context and returns the reply."""


def claim_tasks(
    address: str,
    is_free: Callable[[], bool],
    hand_on: Callable[[str], None],
    secret: bytes,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Claim tasks one by one and pass their tokens on; never returns.

    A SuperNode that does not answer is asked again, as long as this process lives.

    Parameters
    ----------
    is_free : returns whether a worker is free
    hand_on : receives the token of a claimed task
    secret : shared with the SuperNode, so that no other program on the machine can claim its tasks
    """
    signed = SuperExecAuthHttpInterceptor(
        master_secret=secret, protected_methods=frozenset({CLAIM})
    )
    client = _client(address, signed, make_simple_http_retry_invoker(), "SuperExec")
    request = AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP])
    answered = Event()
    while True:
        if is_free():
            # A claimed task must be answered, so none is claimed while the worker is busy.
            answered.set()
            answer = client.AcquireTask(request)
            if answer.HasField("task") and answer.token:
                # The former heartbeat has ended; this one begins before the worker gets the token.
                answered = keep_claim(address, answer.token)
                hand_on(answer.token)
        sleep(ASK_SECONDS)


def keep_claim(address: str, token: str) -> Event:
    """Send heartbeats for a claimed task until the returned event is set.

    A SuperNode gives a task to another process after half a minute without a heartbeat. On a busy
    machine a worker may take longer to start. The SuperNode's replies are ignored here: the worker
    itself learns whether the task still counts.
    """
    answered = Event()
    client = _client(address, RuntimeTokenHttpInterceptor(token), None)

    def tell() -> None:
        # A failed heartbeat is tried again: the SuperNode may be busy.
        while not answered.wait(CLAIM_SECONDS):
            with suppress(httpx.HTTPError, RunNotRunningException):
                client.SendTaskHeartbeat(SendTaskHeartbeatRequest())
        client.close()

    Thread(target=tell, daemon=True).start()
    return answered


def answer_task(
    address: str,
    token: str,
    work: Work,
    reason_of: ReasonOf,
    note: Callable[[bytes], None] = lambda _: None,
) -> None:
    """Pull a task, compute the reply and push it.

    This is Flower's ``run_clientapp`` without the installation of the bundle.

    Parameters
    ----------
    work : computes the reply
    reason_of : returns the text for the server about an error of ``work``
    note : receives the message's metadata before the work begins; with it another process can call
        ``answer_with_error``
    """
    invoker = make_simple_http_retry_invoker()
    client = _client(address, RuntimeTokenHttpInterceptor(token), invoker)
    # A connection without retries: with them the end of a worker whose SuperNode is gone would be
    # delayed.
    beating = _client(address, RuntimeTokenHttpInterceptor(token), None)
    heartbeat = HeartbeatSender(make_task_heartbeat_fn_http(beating))
    context: Context | None = None
    status = SubStatus.FAILED
    details = "the task could not be pulled"
    try:
        # Heartbeats while the work takes long; without them the SuperNode gives the task away.
        heartbeat.start()
        message, context, _, bundle = _pull(client)
        # For the process that answers if this one is killed.
        note(message_to_proto(remove_content_from_message(message)).SerializeToString())
        try:
            reply = work(bundle.content, message, context)
            status = SubStatus.COMPLETED
            details = ""
        except INTERRUPTS:
            raise
        except BaseException as error:
            details = reason_of(error)
            # The server gets an error for this message, and not only a lost task.
            reply = Message(
                Error(code=ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason=details), reply_to=message
            )
        push_message(client, reply, context)
    except RunNotRunningException:
        details = "the run has ended meanwhile"
    except NoMessageError:
        details = "the SuperNode did not receive the whole message"
    except httpx.HTTPError as error:
        details = f"the SuperNode does not answer: {error}"
    finally:
        # The SuperNode may be gone; one attempt is enough at the end.
        invoker.max_tries = 1
        push_task_output(client=client, context=context, sub_status=status, details=details)
        if heartbeat.is_running:
            heartbeat.stop()
        beating.close()
        client.close()


class NoMessageError(Exception):
    """Task whose message the SuperNode has deleted, because it could not be received whole."""


def _pull(client: RuntimeHttpClient) -> tuple[Message, Context, Run, Fab]:
    """Return what a task consists of, or raise NoMessageError."""
    try:
        return pull_task_input(client)
    except ObjectPullError as error:
        raise NoMessageError from error
    except RuntimeError as error:
        if str(error) != NO_MESSAGES:
            raise
        raise NoMessageError from error


def answer_with_error(address: str, token: str, envelope: bytes, reason: str) -> None:
    """Answer a task with an error, the text ``reason``, in place of the process that died with it.

    ``envelope`` is the metadata of the message, as ``answer_task`` passed it to ``note``.
    """
    message = message_from_proto(ProtoMessage.FromString(envelope))
    # This process answers in place of the one that was killed, under its identity.
    TaskIdentity.run_id = message.metadata.run_id
    TaskIdentity.node_id = message.metadata.dst_node_id
    TaskIdentity.task_id = message.metadata.dst_task_id or 0
    invoker = make_simple_http_retry_invoker()
    invoker.max_tries = 1
    client = _client(address, RuntimeTokenHttpInterceptor(token), invoker)
    reply = Message(Error(code=ErrorCode.CLIENT_APP_CRASHED, reason=reason), reply_to=message)
    try:
        push_message(
            client,
            reply,
            Context(message.metadata.run_id, message.metadata.dst_node_id, {}, RecordDict(), {}),
        )
        push_task_output(client=client, context=None, sub_status=SubStatus.FAILED, details=reason)
    except RunNotRunningException:
        # No server waits for the reply.
        pass
    except httpx.HTTPError as error:
        # The SuperNode reports the lost task to the server itself, a minute later.
        tell(f"the SuperNode does not answer: {error}")
    finally:
        client.close()


def _client(
    address: str,
    proof: ProtobufClientInterceptor,
    invoker: RetryInvoker | None,
    component: str = "flwr-clientapp",
) -> RuntimeHttpClient:
    """Return a connection to a SuperNode; ``proof`` authenticates the caller.

    ``invoker`` retries while the SuperNode does not answer, and interrupts this process if a token
    has become invalid (Flower's ``http_retry``). Without it errors are raised.
    """
    return RuntimeHttpClient.from_server_address(
        server_address=address,
        insecure=True,
        root_certificates=None,
        interceptors=[RuntimeVersionHttpInterceptor(component_name=component), proof],
        retry_invoker=invoker,
    )
