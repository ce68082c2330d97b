"""The ClientApp: short handlers that look the method's job up and pass its answer through the egress mod.

Flower starts a process for every message. So whatever takes torch is imported where it is needed: ``fetch`` and ``deliver``
move bytes that are there, and with masks and kept weights do without.
"""

import logging
import platform
import time
from collections.abc import Callable
from importlib import import_module
from types import ModuleType

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from client_app.delivery import take
from client_app.egress import egress
from client_app.held_layers import take_layers
from client_app.parts import hand_out
from client_app.site import Site, reply_to
from espalier.settings.mistakes import Mistake
from espalier.storage.private import collect_old_runs
from espalier.wire.code_hash import code_sha256
from espalier.wire.contract import check
from espalier.wire.contracts import contract_for
from espalier.wire.enrolment import Enrolment
from espalier.wire.messages import Letter, failure, read, write

Work = Callable[[Site, Letter], Letter]

JOBS = {"fedpetuning": "tuning", "fedprllm": "fedprllm", "fedspallm": "fedspallm", "hetlora": "tuning"}
"""The local job of each method: a module of this package with ``train`` and ``evaluate``."""

DELIVERIES: dict[str, Work] = {"fedpetuning": take, "fedprllm": take, "fedspallm": take_layers, "hetlora": take}
"""What each method's clients do with a ``deliver``."""

SECONDS_PER_DAY = 86_400

app = ClientApp(mods=[egress])


@app.query("enrol")
def enrol(message: Message, context: Context) -> Message:
    """Say who this site is and which program and model it has."""
    return _answer(message, context, _enrol)


@app.query("deliver")
def deliver(message: Message, context: Context) -> Message:
    """Keep a part of the federated result."""
    return _answer(message, context, lambda site, request: DELIVERIES[request.header.method](site, request))


@app.train()
def train(message: Message, context: Context) -> Message:
    """Do the method's local work on private data."""
    return _answer(message, context, _train)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Evaluate the local result on public text, and, if asked to, several models on own held-out text."""
    return _answer(message, context, _evaluate)


@app.query("fetch")
def fetch(message: Message, context: Context) -> Message:
    """Hand out a further part of an earlier reply."""
    return _answer(message, context, hand_out)


def job_of(method: str) -> ModuleType:
    """The module with a method's local job."""
    return import_module(f"client_app.{JOBS[method]}")


def _train(site: Site, request: Letter) -> Letter:
    _require_within_limits(site)
    return job_of(request.header.method).train(site, request)


def _evaluate(site: Site, request: Letter) -> Letter:
    """A client that no round has asked to train is checked here."""
    _require_within_limits(site)
    return job_of(request.header.method).evaluate(site, request)


def _require_within_limits(site: Site) -> None:
    """A site's config.json and tokenizer may be others than the server's: the model's hash is of weights and vocabulary."""
    from espalier.modeling.limits import require_within_limits

    require_within_limits(site.settings, site.model)


def _enrol(site: Site, request: Letter) -> Letter:
    import torch

    from client_app.capability import measured_capability

    description = Enrolment(
        site=site.name,
        code_sha256=code_sha256(),
        model_sha256=site.model.sha256,
        capability=site.node.capability or measured_capability(site.computing),
        measured=site.node.capability == 0,
        device="cuda" if site.computing.device.type == "cuda" else "cpu",
        threads=site.computing.threads,
        python=platform.python_version(),
        torch=torch.__version__,
    )
    collect_old_runs(site.node.state_root(), time.time() - site.node.keep_days * SECONDS_PER_DAY)
    return reply_to(request, description)


def _answer(message: Message, context: Context, work: Work) -> Message:
    """Read the request, work, and reply; a mistake is told in its own words, any other error by its type alone."""
    request = read(message.content)
    try:
        site = Site.of(context)
        contract = contract_for(request, site.model.plan, site.settings)
        check(request, contract.down)
        letter = work(site, request)
        letter.header.num_parts = contract.num_parts
    except Mistake as mistake:
        logging.getLogger("espalier").warning("%s refused: %s", request.header.kind, mistake)
        letter = failure(request.header, str(mistake))
    except Exception as error:
        logging.getLogger("espalier").exception("the %s handler failed", request.header.kind)
        letter = failure(request.header, f"unexpected {type(error).__name__} in {request.header.kind}; see this node's log")
    return Message(write(letter), reply_to=message)
