"""Replies and evaluation of methods whose clients send tensors about their calibration samples."""

import time
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import Any

from torch import Tensor

from client_app.protocol.answer_once import answer_once, stored_reply
from client_app.protocol.evaluation import Evaluation, prepare_evaluation, require_own_text
from client_app.protocol.push import pushed_blobs
from client_app.site import Site
from espalier.data.client_text import client_samples
from espalier.hf.stream.edits import BlobEdits, edits_from
from espalier.messages.contracts import plain_contract
from espalier.messages.message import Header, MessageBody
from espalier.messages.parts import Report
from espalier.storage.client_state import PrivateState


def samples_of(site: Site, header: Header) -> Tensor:
    """Return the calibration samples of a client: token ids, shape (samples, tokens), int64."""
    return client_samples(site.settings, site.node, site.model.encode, header.client)


def answer_from_samples(
    site: Site,
    request: MessageBody,
    blobs: Callable[[Tensor], Iterable[bytes]],
    fields: Callable[[Tensor], Mapping[str, Any]] = lambda _: {},
) -> MessageBody:
    """Answer a ``train`` with tensors about the calibration samples. Each round is answered once.

    ``blobs`` returns the blobs of the contract, in its order, and ``fields`` the fields of the
    report apart from those of ``Report``.
    """
    report: Any = site.contract.up.fields
    header = request.header

    def work(state: PrivateState) -> Report:
        started = time.monotonic()
        # Before the round's answer is computed: no round is spent on data that cannot be evaluated.
        require_own_text(site, header)
        samples = samples_of(site, header)
        store = state.blobs(header.server_round)
        # Each blob is stored before the next one is computed.
        hashes = [store.put(blob) for blob in blobs(samples)]
        answer: Report = report(
            seconds=time.monotonic() - started, blob_sha256=hashes, **fields(samples)
        )
        return answer

    return answer_once(site, request, work)


def evaluate_edits(site: Site, request: MessageBody, edits: BlobEdits) -> Evaluation:
    """Prepare to evaluate a method that edits weights by tensors which are those of a reply.

    The local baseline is the base model edited by the client's own tensors.
    """
    header = request.header
    # The contract of the round's ``train``, whose reply is evaluated.
    train = header.model_copy(update={"kind": "train"})
    contract = plain_contract(MessageBody(train), lambda: site.model.plan, site.settings)
    store = site.state(header).blobs(header.server_round)
    hashes = stored_reply(site, header, "reply")["report"]["blob_sha256"]
    keys = chain.from_iterable(contract.parts)
    sent = {key: store.get(blob) for key, blob in zip(keys, hashes, strict=True)}

    return prepare_evaluation(
        site,
        request,
        edits_from(edits, sent, site.settings),
        lambda: edits_from(edits, pushed_blobs(site, header, contract.num_parts), site.settings),
    )
