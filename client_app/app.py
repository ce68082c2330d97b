"""ClientApp: answers to all kinds of messages, each of which passes through the egress check.

Flower starts a process for every message. Everything that needs torch is therefore imported where
it is used: ``fetch`` and ``push`` only move stored bytes, and do not need torch for masks and
kept weights.
"""

import logging
import os
import platform
import sys
import time
from collections.abc import Callable
from types import ModuleType

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from client_app.policy import approval
from client_app.policy.egress_check import egress, reason_of
from client_app.policy.site_policy import require_allowed
from client_app.protocol.answer_once import at_work
from client_app.protocol.push import answer_fetch
from client_app.protocol.secure_sum import advertise, confirm, mask, share, unmask
from client_app.simulation import as_played, in_simulation
from client_app.site import Site, reply_to
from espalier.environment.imports import importing
from espalier.environment.loopback import keep_on_loopback
from espalier.errors import INTERRUPTS, EspalierError, StateLost
from espalier.hf.machine.machine_memory import peak_resident
from espalier.identity.code_hash import code_sha256
from espalier.messages.contract import check
from espalier.messages.enrolment import NO_MODEL, Enrolment, Refusal, refusal
from espalier.messages.message import UNREAD, Kind, MessageBody, NoFields, failure, validate
from espalier.messages.records import read, write
from espalier.settings.libraries import require_libraries
from espalier.settings.node import claimed_name
from espalier.settings.registry import METHODS, part
from espalier.storage.activity import collect_old_work
from espalier.storage.client_state import collect_old_runs
from espalier.storage.peak_memory import note_peak

BEFORE_A_SEAT = ("enrol", "refused")
"""Message kinds that also go to nodes that are not (yet) clients of the run."""
HEAVY = ("train", "local_baseline", "evaluate")
"""Message kinds whose work needs the model."""
SECONDS_PER_DAY = 86_400

# Flower loads this module before it starts Ray in the same process. With this setting, Ray does not
# hide GPUs from clients that reserved none, and prints no warning about it. Later versions of Ray
# behave like this by default.
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
# `flwr run .` would otherwise start Ray's services on all network interfaces.
keep_on_loopback(os.environ)

app = ClientApp(mods=[as_played])


def job_of(method: str) -> ModuleType:
    """Import and return the module with a method's local job."""
    with importing():
        module: ModuleType = part(METHODS[method].job)
    return module


def _push(site: Site, request: MessageBody) -> MessageBody:
    """Store a part of the federated result."""
    answer: MessageBody = part(METHODS[request.header.method].push)(site, request)
    return answer


def _compute(site: Site, request: MessageBody) -> MessageBody:
    """Run the method's local job on private data: a round, or the local baseline."""
    _require_within_limits(site)
    # ``train`` and ``local_baseline`` are functions of the method's module.
    work = getattr(job_of(request.header.method), request.header.kind)
    # The tensors of this round leave only as masked summands.
    if request.header.kind == "train" and site.settings.federation.secure_sum:
        return advertise(site, request, work)
    answer: MessageBody = work(site, request)
    return answer


def _evaluate(site: Site, request: MessageBody) -> MessageBody:
    """Evaluate the local result on evaluation text, and on request all models on held-out text."""
    _require_within_limits(site)
    from client_app.protocol.evaluation import evaluate_once

    return evaluate_once(site, request, job_of(request.header.method).evaluate(site, request))


def _require_within_limits(site: Site) -> None:
    """Raise InputError if the settings exceed what the site's own model supports.

    The model hash covers weights and vocabulary only, so the site's ``config.json`` and tokenizer
    may differ from the server's.
    """
    if not site.settings.job.NEEDS_BASE_MODEL:
        return
    from espalier.hf.opening.base_check import require_within_limits

    require_within_limits(site.settings, site.model)


def _enrol(site: Site, request: MessageBody) -> MessageBody:
    """Report the site's name and the hashes of its program and its model."""
    import torch

    from client_app.policy.identity import own_key, signed_enrolment
    from client_app.protocol.readiness import require_ready
    from espalier.hf.machine.computing import measured_capability

    require_libraries(site.settings)
    # Without keys in the run, a site needs none.
    key = own_key(site) if site.settings.site_keys else None
    # Record the run before the data is checked, because the result of the check depends on the
    # data.
    if not site.node.simulated:
        site.state(request.header).note_asked()
    require_ready(site)
    description = Enrolment(
        # A site that is given its model by the server has no hash of its own.
        site=site.name,
        code_sha256=code_sha256(),
        model_sha256=site.model.sha256 if site.settings.job.NEEDS_BASE_MODEL else NO_MODEL,
        capability=site.node.capability or measured_capability(site.computing),
        measured=site.node.capability == 0,
        device="cuda" if site.computing.device.type == "cuda" else "cpu",
        threads=site.computing.threads,
        approval=bool(site.node.require_approval),
        python=platform.python_version(),
        torch=torch.__version__,
    )
    if not site.node.simulated:
        print(
            f"espalier: run {request.header.lineage} ({site.settings.method}) asks which sites are"
            f" connected; this site answers as {site.name}",
            file=sys.stderr,
            flush=True,
        )
    return reply_to(
        request, description if key is None else signed_enrolment(site, request, description, key)
    )


def _refused(site: Site, request: MessageBody) -> MessageBody:
    """Write to this node's log that the run continues without it, and why."""
    reason = validate(Refusal, request.fields).reason
    text = f"the server of run {request.header.lineage} refused {site.name}: {reason}"
    print(f"espalier: {text}", file=sys.stderr, flush=True)
    return reply_to(request, NoFields())


WORK: dict[Kind, Callable[[Site, MessageBody], MessageBody]] = {
    "enrol": _enrol,
    "refused": _refused,
    "push": _push,
    "train": _compute,
    "local_baseline": _compute,
    "evaluate": _evaluate,
    "fetch": answer_fetch,
    "shares": share,
    "masked": mask,
    "confirm": confirm,
    "unmask": unmask,
}
"""Function that does the work for a message, by kind."""


def _error_text(request: MessageBody, context: Context, reason: str) -> str:
    """Return the error text for the server; enrolment errors are prefixed with the site name."""
    enrols = request.header.kind == "enrol"
    return refusal(claimed_name(context.node_config), reason) if enrols else reason


@app.query("enrol")
@app.query("refused")
@app.query("push")
@app.query("fetch")
@app.query("shares")
@app.query("masked")
@app.query("confirm")
@app.query("unmask")
@app.train()
@app.train("local_baseline")
@app.evaluate()
def answer(message: Message, context: Context) -> Message:
    """Answer a message: read it, do the work, and return what may leave the site."""
    arrived = approval.clock()
    request = None
    # Reading comes first: without a valid header there is no run, and no contract.
    try:
        request = read(message.content)
        site = Site.of(context, request)
    except INTERRUPTS:
        raise
    # Without a request and the node's settings there is no log to write to. Only the reason leaves.
    except BaseException as error:
        logging.getLogger("espalier").warning("a message could not be answered: %s", error)
        reason = reason_of(error)
        body = (
            failure(UNREAD, reason)
            if request is None
            else failure(request.header, _error_text(request, context, reason))
        )
        return Message(write(body), reply_to=message)
    # A person has time to approve until the server stops waiting for this attempt.
    waits_until = approval.deadline(message.metadata.ttl, arrived, request.header.kind)
    content = egress(site, _worked(site, request, context), waits_until)
    return Message(content, reply_to=message)


def _worked(site: Site, request: MessageBody, context: Context) -> MessageBody:
    """Return the reply to a request, or a failure reply.

    The reply to an EspalierError contains its message, the reply to any other error only the type
    of the error. The part of a message that describes a real site's data stays in the node's log
    (``EspalierError.outward``).
    """
    header = request.header
    try:
        # Delete old runs first, because the limit on the number of runs counts those that have
        # state.
        if header.kind == "enrol":
            long_ago = time.time() - site.node.keep_days * SECONDS_PER_DAY
            collect_old_runs(site.node.state_root(), long_ago)
            collect_old_work(site.node.state_root(), long_ago)
        if header.kind != "refused":
            # Every message is checked against the policy, because the owner may have changed it
            # since.
            require_allowed(site, header)
        # The site keeps one client number in a run; a server cannot ask it as several clients.
        if header.kind not in BEFORE_A_SEAT:
            site.state(header).require_same_client()
        with at_work(site, header):
            # A round begins with the tensors of its order; other handlers only store blobs.
            check(request, site.contract.down, keep=header.kind == "train")
            body = WORK[header.kind](site, request)
            # The number of parts follows from the contract, not from the handler.
            body.header.num_parts = site.contract.num_parts
            if site.node.simulated and header.kind in HEAVY:
                note_peak(site.state(header), peak_resident())
            return body
    except EspalierError as error:
        logging.getLogger("espalier").warning("%s refused: %s", header.kind, error)
        # In a simulation the data is the run's own, so the whole text may be shown.
        reason = str(error) if in_simulation() else error.outward
        return failure(header, _error_text(request, context, reason), isinstance(error, StateLost))
    except INTERRUPTS:
        raise
    except BaseException as error:
        logging.getLogger("espalier").exception("the %s handler failed", header.kind)
        return failure(
            header, f"unexpected {type(error).__name__} in {header.kind}; see this node's log"
        )
