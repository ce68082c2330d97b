"""FLAP at a client: mean and variance of the inputs of two matrices of each block.

They are measured in the dense model on the client's own calibration samples. Only these moments are
sent; samples and activations never leave. The local baseline is the cut that follows from the
client's own moments.
"""

import time

from client_app.methods.llm_pruner_cut import delivered_cut
from client_app.protocol.answer_once import answer_once, kept_report
from client_app.protocol.evaluation import Evaluation, prepare_evaluation, require_own_text
from client_app.site import Site
from espalier.data.client_text import client_windows
from espalier.hf.group_scores.flap import (
    flap_cuts,
    pack_moments,
    unpack_moments,
    watched_moments,
)
from espalier.hf.opening.opened import OpenedModel
from espalier.hf.stream.block_stream import BlockStream
from espalier.hf.structured.opened_cut import open_cut
from espalier.messages.message import Header, Letter, validate
from espalier.methods.flap.contract import MomentsReport, biases
from espalier.methods.flap.settings import FlapSettings
from espalier.storage.client_state import PrivateState


def train(site: Site, request: Letter) -> Letter:
    """Measure the moments and reply with the first part. Each round is answered once."""

    def watch(state: PrivateState) -> MomentsReport:
        started = time.monotonic()
        header = request.header
        require_own_text(site, header)
        windows = client_windows(site.settings, site.node, site.model.encode, header.client)
        store = state.blobs(header.server_round)
        stream = BlockStream(site.model, site.computing)
        hashes = [store.put(pack_moments(moments)) for moments in watched_moments(stream, windows)]
        return MomentsReport(
            seconds=time.monotonic() - started, blob_sha256=hashes, tokens=windows.numel()
        )

    return answer_once(site, request, watch)


def evaluate(site: Site, request: Letter) -> Evaluation:
    """Prepare to evaluate the local baseline, and all models on the client's own text."""
    return prepare_evaluation(
        site,
        request,
        _alone(site, request.header),
        lambda: delivered_cut(site, request.header, biases(site.settings)),
    )


def _alone(site: Site, header: Header) -> OpenedModel:
    report = validate(MomentsReport, kept_report(site, header, "moments")["report"])
    store = site.state(header).blobs(header.server_round)
    kept = dict(enumerate(report.blob_sha256))
    cuts = list(
        flap_cuts(
            site.model,
            lambda index: unpack_moments(store.get(kept[index]), report.tokens),
            site.settings.of(FlapSettings),
        )
    )
    return open_cut(site.model, cuts.__getitem__, biases(site.settings))
