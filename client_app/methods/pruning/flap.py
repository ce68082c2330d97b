"""FLAP at a client: sums and sums of squares of the inputs of two matrices of each block.

They are measured in the dense model on the client's own calibration samples. Only these sums are
sent; samples and activations never leave. The local baseline is the cut that follows from the
client's own sums.
"""

from collections.abc import Iterator

from torch import Tensor

from client_app.methods.pruning.pushed_cut import pushed_cut
from client_app.protocol.answer_once import stored_reply
from client_app.protocol.calibration import answer_from_samples
from client_app.protocol.evaluation import Evaluation, prepare_evaluation
from client_app.site import Site
from espalier.hf.group_scores.flap import (
    BlockMoments,
    flap_cuts,
    pack_moments,
    unpack_moments,
    watched_moments,
)
from espalier.hf.opening.opened_model import OpenedModel
from espalier.hf.stream.block_stream import BlockStream
from espalier.hf.structured.selection import open_cut
from espalier.messages.message import Header, MessageBody
from espalier.methods.pruning.flap import FlapSettings, biases


def train(site: Site, request: MessageBody) -> MessageBody:
    """Measure the moments and reply with the first part. Each round is answered once."""

    def moments(samples: Tensor) -> Iterator[bytes]:
        return map(pack_moments, watched_moments(BlockStream(site.model, site.computing), samples))

    return answer_from_samples(site, request, moments)


def evaluate(site: Site, request: MessageBody) -> Evaluation:
    """Prepare to evaluate the local baseline, and all models on the client's own text."""
    return prepare_evaluation(
        site,
        request,
        _alone(site, request.header),
        lambda: pushed_cut(site, request.header, biases(site.settings)),
    )


def _alone(site: Site, header: Header) -> OpenedModel:
    """Return the model by the cut that follows from the client's own moments."""
    report = stored_reply(site, header, "moments")["report"]
    store = site.state(header).blobs(header.server_round)

    # The client's moments are read from its own reply.
    def moments(index: int) -> BlockMoments:
        return unpack_moments(store.get(report["blob_sha256"][index]))

    cuts = list(flap_cuts(site.model, moments, site.settings.of(FlapSettings)))
    return open_cut(site.model, cuts.__getitem__, biases(site.settings))
